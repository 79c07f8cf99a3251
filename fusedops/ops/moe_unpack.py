"""moe_unpack: converts the float8 rows of a payload of ``moe_pack`` to a wider dtype.

Rows that are not quantized are read in place (``PayloadLayout.rows``) and need no op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import define_op
from fusedops.ops._moe_payload import PayloadLayout, dequantize


def moe_unpack(payload: torch.Tensor, probs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of a quantized payload.

    ``row[r, c] = float8(payload[r, c]) * scale[r]``

    Args:
        payload: ``[R, stride]`` uint8, of ``moe_pack(..., quantized=True)``.
        probs: ``[R, pairs]``: with the number and dtype of the probabilities in a row.
        like: ``[..., H]``, with the dtype and hidden size of the rows; its values are not read.

    Returns:
        ``[R, H]`` in the dtype of ``like``.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Exact: scales are powers of two and e4m3 has four significant bits. The op has no gradient,
        as ``moe_pack``.

    Example:
        >>> import torch, fusedops
        >>> rows, probs = torch.tensor([[1.0, 300.0]]), torch.ones(1, 1)
        >>> payload = fusedops.moe_pack(rows, probs, quantized=True)
        >>> fusedops.moe_unpack(payload, probs, rows)
        tensor([[  1., 288.]])
    """
    layout = _check(payload, probs, like)
    return _OP(payload, like, layout.offsets)


def _check(payload: Any, probs: Any, like: Any) -> PayloadLayout:
    op = "moe_unpack"
    checks.index_tensor(op, "payload", payload, dtypes=(torch.uint8,))
    checks.like(op, "probs", probs, "payload", payload)
    checks.like(op, "like", like, "payload", payload)
    if probs.dim() != 2:
        checks.fail(op, "probs", "of 2 dims, [rows, pairs]", list(probs.shape))
    if like.dim() < 1 or like.shape[-1] < 1:
        checks.fail(op, "like", "of shape [..., hidden_size]", list(like.shape))
    layout = PayloadLayout(like.shape[-1], like.dtype, probs.dtype, probs.shape[1], True)
    why = f"rows of probs, bytes of {layout.hidden_size} float8 and {layout.pairs} pairs"
    checks.shape(op, "payload", payload, (probs.shape[0], layout.stride), why)
    return layout


def _reference(payload: torch.Tensor, like: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    scale_at = layout[2]
    # A copy: a part of one row alone would be dense where it is, and begin between two floats.
    scales = payload[:, scale_at : scale_at + 4].clone(memory_format=torch.contiguous_format)
    rows = payload[:, : like.shape[-1]].contiguous()
    return dequantize(rows, scales.view(torch.float32), like.dtype)


_OP = define_op(
    "moe_unpack",
    "(Tensor payload, Tensor like, SymInt[] layout) -> (Tensor rows)",
    contract={
        "payload": "uint8 [count, layout[3]]",
        "like": "T [*leading, features]",
        "rows": "T [count, features]",
        "layout": "len(layout) == 4 and features <= layout[0] and layout[0] <= layout[1]"
        " and layout[1] <= layout[2] and layout[2] + 4 <= layout[3]",
    },
    reference=_reference,
    triton="fusedops.kernels.moe_unpack",
)
