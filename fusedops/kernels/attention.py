"""attention in Triton: launches of the kernels in ``_attention_forward`` and ``_backward``.

The same kernels serve packed sequences (``attention_varlen.py``). Where a tuning table says so, the
plain case runs torch's own kernels instead: ``_attention_torch.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return the configurations beside the default, for the tuner: torch's kernels."""
    return _attention_torch.DENSE


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
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    dropout_p: float,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    keep_remainder: bool,
    *,
    config: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Launch the forward; arguments and results are those of ``fusedops::attention``."""
    call = _call(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sinks,
        seed,
        dropout_p,
        scale,
        window_left,
        window_right,
        softcap,
    )
    if config is not None and _attention_torch.serves(config, call):
        return _attention_torch.forward(config, call, keep_remainder)
    return _attention_forward.forward(call, keep_remainder)


def backward(
    grad_output: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    remainder: torch.Tensor,
    lse_parts: torch.Tensor,
    dropout_p: float,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    keep_remainder: bool,
    output_mask: Sequence[bool],
    *,
    config: str | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Launch the backward; as ``fusedops::attention_backward``."""
    call = _call(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sinks,
        seed,
        dropout_p,
        scale,
        window_left,
        window_right,
        softcap,
    )
    if (
        config is not None
        and grad_output is not None
        and _attention_torch.serves_backward(config, call, grad_lse)
    ):
        return _attention_torch.backward(config, call, grad_output, output, lse, output_mask)
    return _attention_backward.backward(
        call, grad_output, grad_lse, output, lse, remainder, lse_parts, output_mask
    )


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    *numbers: Any,
) -> AttentionCall:
    rows, keys = query.shape[2], key.shape[2]
    tensors = (query, key, value, attn_mask, alibi_slopes, sinks, seed)
    return AttentionCall(*tensors, None, rows, keys, *numbers)


def static_report_cases() -> list[dict[str, Any]]:
    """Return the configurations whose registers, spills and instructions are kept on record."""
    return _attention_report.dense_cases()
