"""attention_varlen in Triton: the kernels of ``attention.py``, with the bounds of each sequence.

The packed tokens are one batch to the kernels; programs are laid out for the longest sequence, and
those past the end of a shorter one return at once.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import _attention_backward, _attention_forward
from fusedops.kernels._arguments import VarlenArguments, of_backward
from fusedops.kernels._attention_launch import AttentionCall
from fusedops.kernels._attention_launch import supports as supports
from fusedops.kernels._attention_launch import supports_backward as supports_backward


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = VarlenArguments(*args)
    output, lse, remainder, _ = _attention_forward.forward(_call(call), call.keep_remainder)
    if remainder.dim() == 4:
        remainder = remainder[0].transpose(0, 1)
    return output[0].transpose(0, 1), lse[0], remainder


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grads, call, (output, lse, remainder), mask = of_backward(VarlenArguments, args, incoming=2)
    grad_output, grad_lse = grads
    incoming = (
        None if grad_output is None else _one_batch(grad_output),
        None if grad_lse is None else grad_lse.unsqueeze(0),
    )
    rest = _one_batch(remainder) if remainder.numel() else remainder
    kept = (_one_batch(output), lse.unsqueeze(0), rest, lse.new_empty(0))
    dq, dk, dv, _, dsinks = _attention_backward.backward(
        _call(call), *incoming, *kept, (*mask[:3], False, mask[3])
    )
    packed = (None if grad is None else grad[0].transpose(0, 1) for grad in (dq, dk, dv))
    return (*packed, dsinks)


def _call(call: VarlenArguments) -> AttentionCall:
    query, key, value = map(_one_batch, call[:3])
    slopes, sinks, seed = call[5:8]
    return AttentionCall(query, key, value, None, slopes, sinks, seed, call[3:5], *call[8:15])


def _one_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return packed ``[tokens, H, D]`` as ``[1, H, tokens, D]``."""
    return tensor.transpose(0, 1).unsqueeze(0)
