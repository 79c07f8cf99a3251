"""attention in Triton: launches of the kernels in ``_attention_forward`` and ``_backward``.

The same kernels serve packed sequences (``attention_varlen.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _attention_backward, _attention_forward
from fusedops.kernels._attention_launch import AttentionCall
from fusedops.kernels._attention_launch import supports as supports
from fusedops.kernels._attention_launch import supports_backward as supports_backward


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::attention``."""
    *inputs, keep_remainder = args
    return _attention_forward.forward(_call(*inputs), keep_remainder)


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *args: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_backward``."""
    output, lse, remainder, lse_parts = args[7:11]
    *numbers, _, output_mask = args[11:]
    call = _call(*args[:7], *numbers)
    return _attention_backward.backward(
        call, grad_output, grad_lse, output, lse, remainder, lse_parts, output_mask
    )


def _call(*inputs: Any) -> AttentionCall:
    query, key, value, mask, slopes, sinks, seed, *numbers = inputs
    tensors = (query, key, value, mask, slopes, sinks, seed)
    return AttentionCall(*tensors, None, query.shape[2], key.shape[2], *numbers)
