"""attention_varlen in Triton: the kernels of ``attention.py``, with the bounds of each sequence.

The packed tokens are one batch to the kernels; programs are laid out for the longest sequence, and
those past the end of a shorter one return at once.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _attention_backward, _attention_forward
from fusedops.kernels._attention_launch import AttentionCall
from fusedops.kernels._attention_launch import supports as supports
from fusedops.kernels._attention_launch import supports_backward as supports_backward


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::attention_varlen``."""
    *inputs, keep_remainder = args
    output, lse, remainder, _ = _attention_forward.forward(_call(*inputs), keep_remainder)
    if remainder.dim() == 4:
        remainder = remainder[0].transpose(0, 1)
    return output[0].transpose(0, 1), lse[0], remainder


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *args: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_varlen_backward``."""
    inputs, (output, lse, remainder), (*numbers, _, output_mask) = args[:8], args[8:11], args[11:]
    call = _call(*inputs, *numbers)
    dq, dk, dv, _, dsinks = _attention_backward.backward(
        call,
        None if grad_output is None else _one_batch(grad_output),
        None if grad_lse is None else grad_lse.unsqueeze(0),
        _one_batch(output),
        lse.unsqueeze(0),
        _one_batch(remainder) if remainder.numel() else remainder,
        lse.new_empty(0),
        (*output_mask[:3], False, output_mask[3]),
    )
    packed = (None if grad is None else grad[0].transpose(0, 1) for grad in (dq, dk, dv))
    return (*packed, dsinks)


def _call(*inputs: Any) -> AttentionCall:
    query, key, value, cu_seqlens_q, cu_seqlens_k, slopes, sinks, seed = inputs[:8]
    tensors = (_one_batch(query), _one_batch(key), _one_batch(value), None, slopes, sinks, seed)
    return AttentionCall(*tensors, (cu_seqlens_q, cu_seqlens_k), *inputs[8:])


def _one_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return packed ``[tokens, H, D]`` as ``[1, H, tokens, D]``."""
    return tensor.transpose(0, 1).unsqueeze(0)
