"""Rows of a padded dim: ``F.pad`` in all modes, and halos at the borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.spatial.halo import extend, fetch_rows, span_window
from fusedops.parallel.spatial.partition import Cut, Interval, merged, overlap
from fusedops.parallel.spatial.tensor import rule, unwrap, wrap


def padded_rows(
    op: str,
    local: Tensor,
    dim: int,
    cut: Cut,
    spans: Sequence[Interval],
    mode: str,
    value: float = 0.0,
) -> Tensor:
    """Return padded positions of a cut dim, those of this rank's span; differentiable.

    ``spans`` are those of all ranks, and may lie outside of the tensor.
    """
    low = max([-start for start, stop in spans if start < stop], default=0)
    high = max([stop - cut.size for start, stop in spans if start < stop], default=0)
    check_padding(op, mode, cut.size, low, high)
    if mode == "constant":
        return extend(local, [span_window(dim, cut, spans)], fill=value, label=op)
    sources = [_sources(span, cut.size, mode) for span in spans]
    needs = tuple(
        merged([inside, *((row, row + 1) for row in (*before, *behind))])
        for before, inside, behind in sources
    )
    rows = fetch_rows(local, dim, cut, needs, label=op)
    before, inside, behind = sources[cut.axis.rank]
    if not before and not behind:
        return rows
    mine = needs[cut.axis.rank]
    parts = [
        _picked(rows, dim, [_place(mine, row) for row in before]),
        rows.narrow(dim, _place(mine, inside[0]), inside[1] - inside[0]),
        _picked(rows, dim, [_place(mine, row) for row in behind]),
    ]
    return torch.cat(parts, dim)


def _sources(span: Interval, size: int, mode: str) -> tuple[list[int], Interval, list[int]]:
    """Return the rows of positions before the tensor, the ones in it, and those behind it."""

    def row(position: int) -> int:
        if mode == "circular":
            return position % size
        if mode == "replicate":
            return min(max(position, 0), size - 1)
        return min(abs(position), 2 * (size - 1) - position)

    start, stop = span
    before = [row(position) for position in range(start, min(stop, 0))]
    behind = [row(position) for position in range(max(start, size), stop)]
    return before, overlap(span, (0, size)) or (0, 0), behind


def _place(intervals: Sequence[Interval], row: int) -> int:
    """Return the index of a row among those of intervals; 0 for one that they do not have."""
    index = 0
    for start, stop in intervals:
        if start <= row < stop:
            return index + row - start
        index += stop - start
    return 0


def _picked(x: Tensor, dim: int, rows: list[int]) -> Tensor:
    """Return some rows of a dim, in this order."""
    return x.index_select(dim, device_tensor(rows, torch.int64, x.device))


def check_padding(op: str, mode: str, size: int, low: int, high: int) -> None:
    """Raise where a dim of ``size`` rows cannot be padded by so many."""
    widest = max(low, high)
    if mode == "reflect" and widest >= size:
        checks.fail(op, "reflect padding", f"smaller than the {size} rows of the dim", widest)
    if mode == "circular" and widest > size:
        checks.fail(op, "circular padding", f"at most the {size} rows of the dim", widest)
    if mode == "replicate" and size == 0 and widest > 0:
        checks.fail(op, "replicate padding", "0 for a dim of no rows", widest)


@rule("pad")
def _pad(
    func: Any, input: Any, pad: Any, mode: str = "constant", value: float | None = None
) -> Any:
    """Pad; rows move only where a mode takes them from the other end of the tensor."""
    partition, local, rest = input._partition, unwrap(input), list(pad)
    for index in range(len(pad) // 2):
        dim, low, high = input.dim() - 1 - index, int(pad[2 * index]), int(pad[2 * index + 1])
        cut, size = partition.cuts[dim], partition.shape[dim] + low + high
        if cut is None:
            partition = partition.replaced(dim, size)
            continue
        rest[2 * index : 2 * index + 2] = [0, 0]
        if (low, high) == (0, 0):
            continue
        if size < 0:
            checks.fail("pad", "pad", f"at least -{cut.size} in sum for dim {dim}", (low, high))
        inner = [min(max(bound + low, 0), size) for bound in cut.bounds[1:-1]]
        target = cut.with_bounds([0, *inner, size])
        spans = [(start - low, stop - low) for start, stop in target.spans()]
        local = padded_rows("pad", local, dim, cut, spans, mode, value or 0.0)
        partition = partition.replaced(dim, size, target)
    if any(rest):
        # Torch pads an empty part with constants only; it has no values in any mode.
        local = func(local, rest, mode if local.numel() else "constant", value)
    return wrap(local, partition)
