"""Samples and sizes that the specs of ``swiglu`` and ``geglu`` share."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes


def samples(new: TensorFactory) -> list[Sample]:
    def chunks(*shape: int) -> tuple[Any, ...]:
        halves = new(*shape[:-1], 2 * shape[-1]).detach().chunk(2, -1)
        return tuple(half.requires_grad_() for half in halves)

    return [
        Sample("plain", (new(5, 24), new(5, 24, key="up"))),
        Sample("chunks", chunks(4, 3, 21)),
        Sample("wide", (new(3, 5, 17, scale=8.0), new(3, 5, 17, key="up"))),
        Sample("extremes", (with_extremes(new(8, 6)), with_extremes(new(8, 6, key="up")))),
        Sample("scalar", (new(), new(key="up"))),
        Sample("one_element", (new(1), new(1, key="up"))),
        Sample("several_blocks", (new(3, 4099), new(3, 4099, key="up"))),
        Sample("chunks_of_several_blocks", chunks(3, 4099)),
        Sample("empty", (new(0, 5), new(0, 5))),
    ]


def bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    return [bad_changes(gate=x, up=x)("shape", "up", "[3, 8]", "[3, 1]", up=x[:, :1])]


def case(rows: int, columns: int, *others: Any, chunks: bool = False) -> BenchCase:
    """Return a size; ``others`` follow gate and up in the call."""

    def make(new: TensorFactory) -> tuple[Any, ...]:
        if chunks:
            gate_up = new(rows, 2 * columns, grad=False)
            pair = [half.requires_grad_() for half in gate_up.chunk(2, -1)]
        else:
            pair = [new(rows, columns, key=key) for key in "gu"]
        return (*pair, *others)

    words = [f"{rows}x{columns}", *map(str, others), *(["chunks"] if chunks else [])]
    size = rows * columns
    return BenchCase.moving(" ".join(words), make, (3 * size, 5 * size))
