"""attention in Triton: launches of the kernels in ``_attention_forward`` and ``_backward``.

The same kernels serve packed sequences (``attention_varlen.py``). Where a tuning table says so, the
plain case runs torch's own kernels instead: ``_attention_torch.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import (
    _attention_backward,
    _attention_forward,
    _attention_torch,
)
from fusedops.kernels._attention_launch import AttentionCall
from fusedops.kernels._attention_launch import supports as supports
from fusedops.kernels._attention_launch import supports_backward as supports_backward


def configs() -> tuple[str, ...]:
    """Return the configurations other than the default, for the tuner: torch's kernels."""
    return _attention_torch.DENSE


def forward(*args: Any, config: str | None = None) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::attention``."""
    *inputs, keep_remainder = args
    call = _call(*inputs)
    if _attention_torch.serves(config, call):
        return _attention_torch.forward(config, call, keep_remainder)
    return _attention_forward.forward(call, keep_remainder)


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *args: Any,
    config: str | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_backward``."""
    output, lse, remainder, lse_parts = args[7:11]
    *numbers, _, output_mask = args[11:]
    call = _call(*args[:7], *numbers)
    if grad_output is not None and _attention_torch.serves_backward(config, call, grad_lse):
        return _attention_torch.backward(config, call, grad_output, output, lse, output_mask)
    return _attention_backward.backward(
        call, grad_output, grad_lse, output, lse, remainder, lse_parts, output_mask
    )


def _call(*inputs: Any) -> AttentionCall:
    query, key, value, mask, slopes, sinks, seed, *numbers = inputs
    tensors = (query, key, value, mask, slopes, sinks, seed)
    return AttentionCall(*tensors, None, query.shape[2], key.shape[2], *numbers)
