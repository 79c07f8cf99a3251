"""attention_varlen in Triton: the kernels of ``attention.py``, told where each sequence lies.

The packed tokens are one batch to the kernels; programs are laid out for the longest sequence, and
those past the end of a shorter one return at once.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.kernels import (
    _attention_backward,
    _attention_forward,
    _attention_report,
    _attention_torch,
)
from fusedops.kernels._attention_launch import AttentionCall, unsupported


def configs() -> tuple[str, ...]:
    """Return the configurations beside the default, for the tuner: torch's kernel."""
    return _attention_torch.PACKED


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> str | None:
    """Return why the kernels cannot run on these arguments, ``None`` where they can."""
    return unsupported(query, value)


def supports_backward(
    grad_output: Any,
    grad_lse: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> str | None:
    """Return the same for the backward."""
    return unsupported(query, value)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    *numbers: Any,
    config: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward; arguments and results are those of ``fusedops::attention_varlen``."""
    tables = (cu_seqlens_q, cu_seqlens_k)
    *sizes, keep_remainder = numbers
    call = _call(query, key, value, alibi_slopes, sinks, seed, tables, *sizes)
    if config is not None and _attention_torch.serves(config, call):
        output, lse, remainder, _ = _attention_torch.forward(config, call, keep_remainder)
    else:
        output, lse, remainder, _ = _attention_forward.forward(call, keep_remainder)
    if remainder.dim() == 4:
        remainder = remainder[0].transpose(0, 1)
    return output[0].transpose(0, 1), lse[0], remainder


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    remainder: torch.Tensor,
    *numbers: Any,
    config: str | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_varlen_backward``."""
    *sizes, _, output_mask = numbers
    tables = (cu_seqlens_q, cu_seqlens_k)
    call = _call(query, key, value, alibi_slopes, sinks, seed, tables, *sizes)
    do = None if grad_output is None else _one_batch(grad_output)
    if (
        config is not None
        and do is not None
        and _attention_torch.serves_backward(config, call, grad_lse)
    ):
        dq, dk, dv, _, dsinks = _attention_torch.backward(
            config, call, do, _one_batch(output), lse.unsqueeze(0), output_mask
        )
    else:
        dq, dk, dv, _, dsinks = _attention_backward.backward(
            call,
            do,
            None if grad_lse is None else grad_lse.unsqueeze(0),
            _one_batch(output),
            lse.unsqueeze(0),
            _one_batch(remainder) if remainder.numel() else remainder,
            lse.new_empty(0),
            (*output_mask[:3], False, output_mask[3]),
        )
    packed = (None if each is None else each[0].transpose(0, 1) for each in (dq, dk, dv))
    return (*packed, dsinks)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    *numbers: Any,
) -> AttentionCall:
    tensors = (_one_batch(query), _one_batch(key), _one_batch(value))
    return AttentionCall(*tensors, None, alibi_slopes, sinks, seed, tables, *numbers)


def _one_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Return packed ``[tokens, H, D]`` as ``[1, H, tokens, D]``."""
    return tensor.transpose(0, 1).unsqueeze(0)


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _attention_report.packed_cases()
