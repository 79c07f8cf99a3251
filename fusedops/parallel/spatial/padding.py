"""Rows of a padded dim: ``F.pad`` in all modes, and halos at the borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._core import checks
from fusedops.parallel.spatial.halo import fetch_rows
from fusedops.parallel.spatial.partition import (
    Cut,
    Factor,
    Interval,
    RowRun,
    merged,
    runs,
)
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

    Args:
        op: for messages.
        local: this rank's part.
        dim: of it.
        cut: of the dim.
        spans: for each rank, positions that may lie outside of the tensor.
        mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: of a constant.
    """
    low = max([-start for start, stop in spans if start < stop], default=0)
    high = max([stop - cut.size for start, stop in spans if start < stop], default=0)
    check_padding(op, mode, cut.size, low, high)
    parts = [runs(span, cut.size, mode) for span in spans]
    needs = tuple(merged([run.interval for run in part]) for part in parts)
    source = fetch_rows(local, dim, cut, needs, label=op)
    mine, own = parts[cut.axis.rank], needs[cut.axis.rank]
    if len(mine) == 1 and mine[0].step == 1:
        return source
    pieces = [_piece(source, dim, run, own, value) for run in mine]
    return torch.cat(pieces, dim) if pieces else source


def _piece(source: Tensor, dim: int, run: RowRun, own: Sequence[Interval], value: float) -> Tensor:
    shape = list(source.shape)
    shape[dim] = run.count
    if run.start < 0:
        return source.new_full(shape, value)
    offset = 0
    for start, stop in own:
        if start <= run.interval[0] < stop:
            offset += run.interval[0] - start
            break
        offset += stop - start
    piece = source.narrow(dim, offset, run.interval[1] - run.interval[0])
    if run.step == 0:
        return piece.expand(shape)
    return piece.flip(dim) if run.step < 0 else piece


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
    partition, local = input._partition, unwrap(input)
    amounts = {
        input.dim() - 1 - index: (int(pad[2 * index]), int(pad[2 * index + 1]))
        for index in range(len(pad) // 2)
    }
    rest = list(pad)
    for dim, (low, high) in amounts.items():
        cut = partition.cut("pad", dim)
        if cut is None:
            size = partition.shape[dim] + low + high
            partition = partition.replaced(dim, Factor(size))
            continue
        place = 2 * (input.dim() - 1 - dim)
        rest[place : place + 2] = [0, 0]
        if (low, high) == (0, 0):
            continue
        size = cut.size + low + high
        if size < 0:
            checks.fail("pad", "pad", f"at least -{cut.size} in sum for dim {dim}", (low, high))
        inner = [min(max(bound + low, 0), size) for bound in cut.bounds[1:-1]]
        target = cut.moved([0, *inner, size])
        spans = [(start - low, stop - low) for start, stop in target.spans()]
        local = padded_rows("pad", local, dim, cut, spans, mode, value or 0.0)
        partition = partition.replaced(dim, Factor(size, target))
    if any(rest):
        # Torch pads an empty part with constants only; it has no values in any mode.
        local = func(local, rest, mode if local.numel() else "constant", value)
    return wrap(local, partition)
