"""attention in Triton: launches of the kernels in ``_attention_forward`` and ``_backward``.

The same kernels serve packed sequences (``attention_varlen.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _attention_backward, _attention_forward
from fusedops.kernels._arguments import AttentionArguments, of_backward
from fusedops.kernels._attention_launch import AttentionCall
from fusedops.kernels._attention_launch import supports as supports
from fusedops.kernels._attention_launch import supports_backward as supports_backward


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    call = AttentionArguments(*args)
    return _attention_forward.forward(_call(call), call.keep_remainder)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grads, call, kept, output_mask = of_backward(AttentionArguments, args, incoming=2)
    return _attention_backward.backward(_call(call), *grads, *kept, output_mask)


def _call(call: AttentionArguments) -> AttentionCall:
    numbers: tuple[Any, ...] = (call.query.shape[2], call.key.shape[2], *call[7:12])
    return AttentionCall(*call[:7], None, *numbers)
