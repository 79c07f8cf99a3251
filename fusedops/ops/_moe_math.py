"""What moe_permute and moe_unpermute do alike, in torch operations: the specification of both.

Slot ``j`` of token ``t`` has its row at ``positions[t, j]``; it is dropped when that is at or past
``offsets[-1]``. Rows behind ``offsets[-1]`` are zeros when written and are not read: whatever they
hold (NaN of an uninitialised tail) reaches nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.ops._routing_plan import RoutingPlan, check_plan


def check(op: str, input: Any, plan: Any, *, of_tokens: bool) -> None:
    """Raise unless ``input`` is a floating matrix of the plan's tokens, or of its rows."""
    checks.tensor(op, "input", input)
    check_plan(op, plan)
    layout = "[tokens, hidden]" if of_tokens else "[tokens * top_k, hidden]"
    if input.dim() != 2:
        checks.fail(op, "input", f"of 2 dims, {layout}", list(input.shape))
    check_order(op, plan, input)
    rows = plan.num_tokens if of_tokens else plan.num_tokens * plan.top_k
    why = "plan.num_tokens" if of_tokens else "plan.num_tokens * plan.top_k"
    if input.shape[0] != rows:
        checks.fail(op, "input", f"of {rows} rows ({why})", list(input.shape))


def check_order(op: str, plan: RoutingPlan, input: torch.Tensor) -> None:
    """Raise unless the plan's index tensors are such, and on the device of ``input``."""
    for name, dims in (("positions", 2), ("offsets", 1)):
        tensor = getattr(plan, name)
        checks.index_tensor(op, f"plan.{name}", tensor)
        if tensor.dim() != dims:
            checks.fail(op, f"plan.{name}", f"of {dims} dims", list(tensor.shape))
        if tensor.device != input.device:
            checks.fail(op, "plan", f"on {input.device}, the device of input", tensor.device)
    if plan.offsets.shape[0] < 1:
        checks.fail(op, "plan.offsets", "of at least one expert", list(plan.offsets.shape))


def check_places(op: str, positions: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise unless each slot's row is one of the rows; looks at values, where they can be read.

    The C++ kernels look by themselves. On a GPU nobody does: the host would wait for the device.
    """
    rows = positions.numel()
    checks.indices(op, "plan.positions", positions, rows, f"in [0, {rows})")
    if checks.readable(offsets) and not 0 <= int(offsets[-1]) <= rows:
        checks.fail(op, "plan.offsets", f"ending in [0, {rows}]", int(offsets[-1]))


def kept_slots(positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return which slots have a row: bool of the shape of ``positions``."""
    return positions < offsets[-1]


def scatter(
    input: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the rows ``[tokens * top_k, hidden]`` of ``[tokens, hidden]``, times ``probs``."""
    slots = input.unsqueeze(1).expand(-1, positions.shape[1], -1)
    if probs is not None:
        weights = _kept_only(probs, positions, offsets).unsqueeze(2)
        slots = (slots.to(probs.dtype) * weights).to(input.dtype)
    kept = kept_slots(positions, offsets).unsqueeze(2)
    slots = torch.where(kept, slots, input.new_zeros(()))
    rows = slots.flatten(0, 1)
    output = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    return output.index_copy(0, positions.flatten().long(), rows)


def slots_of(rows: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return each slot's row, ``[tokens, top_k, hidden]`` in the accumulation dtype; 0 if dropped.

    A dropped slot takes the row of a kept one (if there is any) and is then cleared: the rows
    behind ``offsets[-1]`` are not read.
    """
    kept = kept_slots(positions, offsets)
    places = torch.where(kept, positions, 0).flatten().long()
    slots = rows.index_select(0, places).view(*positions.shape, rows.shape[1])
    wide = slots.to(dtypes.statistics_dtype(rows.dtype))
    return torch.where(kept.unsqueeze(2), wide, wide.new_zeros(()))


def combine(
    input: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return ``[tokens, hidden]``, the (weighted) sum of each token's kept rows in slot order."""
    slots = slots_of(input, positions, offsets)
    if probs is not None:
        slots = slots * _kept_only(probs, positions, offsets).unsqueeze(2)
    total = slots.new_zeros(slots.shape[0], slots.shape[2])
    for choice in range(positions.shape[1]):
        total = total + slots[:, choice]
    return total.to(input.dtype)


def _kept_only(probs: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the weights, 0 for a dropped slot whatever stands there."""
    kept = kept_slots(positions, offsets)
    return torch.where(kept, probs, probs.new_zeros(()))


def shard_columns() -> list[Sharding]:
    """Shard the columns of a linear op, which are independent; rows need the unsharded plan."""
    words: tuple[Placement, ...] = (REPLICATE, 1, PARTIAL)
    return [([word], [word, REPLICATE, REPLICATE]) for word in words]
