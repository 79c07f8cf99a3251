"""moe_pack: packs rows, probabilities and expert ids into one payload of bytes, ordered by a plan.

``_moe_payload.py`` defines the layout and ``fusedops.parallel`` the exchange.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import define_op
from fusedops.kernels._arguments import PackArguments
from fusedops.ops._moe_payload import PayloadLayout, quantize


def moe_pack(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    *,
    index: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    span: int = 0,
    quantized: bool = False,
) -> torch.Tensor:
    """Pack rows with their probabilities and expert ids into bytes.

    Row ``r`` holds ``input[index[r] // k]`` and the probability and id of slot ``index[r]``, or of
    all ``k`` slots of that token. Without ``index``, row ``r`` is token ``r`` with all its slots.

    Args:
        input: ``[T, H]``, any floating dtype, any strides.
        probs: ``[T, k]`` float32 or float64.
        expert_ids: ``[T, k]`` int32; ``None`` writes -1.
        index: ``[R]`` int32: the slot ``token * k + choice`` of each row, in any order; a plan's
            ``permutation``.
        num_rows: one int32: rows from this index on are zeros, and their ``index`` is not read;
            usually the last of a plan's ``offsets``. Default: no such rows.
        span: 0 packs only the slot of ``index``. Above 0 all ``k`` slots of the token are packed,
            and those whose ``expert_ids // span`` is not that of the named slot get id -1 and
            probability 0: the information that a node of ``span`` experts needs about a token.
        quantized: rows are sent as float8 (e4m3) with a float32 scale per row.

    Returns:
        ``[R, stride]`` uint8; ``fusedops/ops/_moe_payload.py`` has the layout and reads it.

    Raises:
        ValueError: a shape, a device or (CPU) an index does not fit; on CUDA, where a check would
            wait for the device, a row with an invalid index is zeros.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        One pass: each row is read and written once (twice read when quantized). A float8 scale is a
        power of two, so bytes are equal on all backends. The op has no gradient: the exchange in
        ``fusedops.parallel`` sends gradients in the same layout.

    Example:
        >>> import torch, fusedops
        >>> rows, probs = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5], [0.25]])
        >>> payload = fusedops.moe_pack(rows, probs, index=torch.tensor([1, 0], dtype=torch.int32))
        >>> payload.shape, payload[:, :8].view(torch.float32).tolist()
        (torch.Size([2, 16]), [[3.0, 4.0], [1.0, 2.0]])
    """
    _check(input, probs, expert_ids, index, num_rows, span)
    checks.flag("moe_pack", "quantized", quantized)
    layout = payload_layout(input, probs, index=index, span=span, quantized=quantized)
    return _OP(input, probs, expert_ids, index, num_rows, span, quantized, layout.offsets)


def payload_layout(
    input: torch.Tensor,
    probs: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
    span: int = 0,
    quantized: bool = False,
) -> PayloadLayout:
    """Return where the parts of the rows that ``moe_pack`` makes of these arguments stand."""
    pairs = probs.shape[1] if index is None or span > 0 else 1
    return PayloadLayout(input.shape[1], input.dtype, probs.dtype, pairs, quantized)


def _check(input: Any, probs: Any, expert_ids: Any, index: Any, num_rows: Any, span: Any) -> None:
    op = "moe_pack"
    checks.tensor(op, "input", input)
    if input.dim() != 2 or input.shape[1] < 1:
        checks.fail(op, "input", "of 2 dims, [tokens, hidden_size]", list(input.shape))
    checks.like(op, "probs", probs, "input", input)
    if probs.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: probs must be float32 or float64, got {probs.dtype}")
    if probs.dim() != 2 or probs.shape[0] != input.shape[0]:
        checks.fail(op, "probs", f"[{input.shape[0]}, top_k], a row per token", list(probs.shape))
    for name, value in (("expert_ids", expert_ids), ("index", index), ("num_rows", num_rows)):
        if value is None:
            continue
        checks.index_tensor(op, name, value)
        if value.device != input.device:
            checks.fail(op, name, f"on {input.device}, the device of input", value.device)
    if expert_ids is not None:
        checks.shape(op, "expert_ids", expert_ids, probs.shape, "that of probs")
    if index is not None and index.dim() != 1:
        checks.fail(op, "index", "of 1 dim", list(index.shape))
    if num_rows is not None and num_rows.numel() != 1:
        checks.fail(op, "num_rows", "one number", list(num_rows.shape))
    checks.integer(op, "span", span, least=0)
    if span > 0 and (index is None or expert_ids is None):
        checks.fail(op, "span", "0 without index and expert_ids", span)


def _reference(*args: Any) -> torch.Tensor:
    call = PackArguments(*args)
    input, probs, expert_ids, index, num_rows, span, quantized, layout = call
    rows = call.rows
    probs_at, ids_at, scale_at, stride = layout
    tokens, top_k = probs.shape
    ids = torch.full_like(probs, -1, dtype=torch.int32) if expert_ids is None else expert_ids
    real = torch.ones(rows, dtype=torch.bool, device=input.device)
    if num_rows is not None:
        real = torch.arange(rows, device=input.device) < num_rows
    data = input
    if index is not None:
        legal = (index >= 0) & (index < tokens * top_k)
        if input.device.type == "cpu" and not bool((legal | ~real).all()):
            row = int((real & ~legal).nonzero()[0])
            got = f"{int(index[row])} at row {row}"
            checks.fail("moe_pack", "index", f"in [0, {tokens * top_k})", got)
        real = real & legal
        slot = torch.where(real, index, 0).long()
        if tokens * top_k == 0:
            return input.new_zeros((rows, stride), dtype=torch.uint8)
        data = input[slot // top_k]
        if span == 0:
            probs, ids = probs.reshape(-1)[slot, None], ids.reshape(-1)[slot, None]
        else:
            place = ids.reshape(-1)[slot, None] // span
            probs, ids = probs[slot // top_k], ids[slot // top_k]
            here = ids // span == place
            probs, ids = torch.where(here, probs, 0.0), torch.where(here, ids, -1)
    payload = input.new_zeros((rows, stride), dtype=torch.uint8)
    if quantized:
        data, scales = quantize(data)
        payload[:, scale_at : scale_at + 4] = scales.view(torch.uint8)
    data = dtypes.bits(data, torch.uint8)
    payload[:, : data.shape[1]] = data
    payload[:, probs_at:ids_at] = dtypes.bits(probs, torch.uint8)
    payload[:, ids_at:scale_at] = dtypes.bits(ids, torch.uint8)
    return torch.where(real[:, None], payload, 0)


_OP = define_op(
    "moe_pack",
    "(Tensor input, Tensor probs, Tensor? expert_ids, Tensor? index, Tensor? num_rows,"
    " SymInt span, bool quantized, SymInt[] layout) -> (Tensor payload)",
    contract={
        "input": "T [tokens, features]",
        "probs": "float32 | float64 [tokens, top_k]",
        "expert_ids": "int32 [tokens, top_k]",
        "index": "int32 [rows]",
        "num_rows": "int32 [] | [1]",
        "payload": "uint8 [rows if given(index) else tokens, layout[3]]",
        "features": "features >= 1",
        "pairs": "1 if given(index) and span == 0 else top_k",
        "span": "span == 0 or span > 0 and given(index) and given(expert_ids)",
        "layout": "len(layout) == 4"
        " and layout[0] == (features * (1 if quantized else itemsize(input)) + 7) // 8 * 8"
        " and layout[1] == layout[0] + pairs * itemsize(probs)"
        " and layout[2] == layout[1] + pairs * 4"
        " and layout[3] == (layout[2] + 4 * quantized + 15) // 16 * 16",
    },
    reference=_reference,
    triton="fusedops.kernels.moe_pack",
)
