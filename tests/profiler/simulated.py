"""Steps of many ranks, simulated: own times with noise, who waits for whom, and planted faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedops.profiler import RunShape, TimingsWriter
from fusedops.profiler.timings import FIELDS, REGULAR, SECTIONS, column

# Seconds of the sections of a step without noise.
USUAL = {"data": 0.01, "forward": 0.10, "backward": 0.20, "optimizer": 0.03, "other": 0.005}
TRANSFER = {"tp": 0.02, "cp": 0.01, "ep": 0.02, "pp": 0.004, "dp": 0.03, "world": 0.001}
KINDS = ("rank", "stage", "link", "data", "experts", "pause")


@dataclass(frozen=True)
class Fault:
    """What is wrong from a step on, and by how much of a step."""

    kind: str
    ranks: tuple[int, ...]
    section: str
    since: int
    share: float


def draw_shape(draw: random.Random, kind: str = "") -> RunShape:
    """Return a mesh in which a fault of a kind can be."""
    while True:
        sizes = {name: draw.choice((1, 2, 4)) for name in ("pp", "dp", "cp", "tp")}
        shape = RunShape(sizes | {"ep": draw.choice((1, sizes["dp"]))})
        peers = shape.ranks // sizes["pp"]
        if kind == "stage" and (sizes["pp"] < 2 or peers < 2):
            continue
        if kind == "experts" and shape.sizes["ep"] < 2:
            continue
        if peers >= 2 and shape.ranks <= 64:
            return shape


def draw_fault(draw: random.Random, shape: RunShape, kind: str) -> Fault:
    """Return a fault that slows a step by a tenth or more."""
    rank, since = draw.randrange(shape.ranks), draw.randrange(16, 24)
    section = draw.choice(("forward", "backward"))
    share = draw.choice((0.1, 0.15, 0.3, 1.0))
    if kind == "rank":
        return Fault(kind, (rank,), draw.choice(REGULAR[:4]), since, share)
    if kind == "stage":
        stage = draw.randrange(shape.sizes["pp"])
        ranks = tuple(r for r in range(shape.ranks) if shape.stage_of(r) == stage)
        return Fault(kind, ranks, section, since, share)
    if kind == "link":
        names = [name for name in ("tp", "cp", "dp") if len(shape.groups(name)[0]) > 1]
        name = draw.choice(names)
        return Fault(kind, tuple(draw.choice(shape.groups(name))), name, since, share)
    if kind == "pause":
        return Fault(kind, (rank,), draw.choice(("gc", "forward")), since, draw.choice((0.5, 2.0)))
    return Fault(kind, (rank,), section, since, max(share, 0.15))


def steps(
    shape: RunShape,
    count: int,
    draw: random.Random,
    fault: Fault | None = None,
    noise: float = 0.02,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of all ranks, step by step."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    ranks = shape.ranks
    # Ranks differ a little for good, and stages by their layers.
    lasting = 1 + 0.5 * noise * torch.randn(ranks, generator=generator)
    stages = torch.tensor([1 + 0.1 * (shape.stage_of(rank) % 2) for rank in range(ranks)])
    usual = sum(USUAL.values())
    for step in range(1, count + 1):
        rows = torch.zeros(ranks, len(FIELDS))
        first = 3.0 if step <= 2 else 1.0  # kernels are tuned, caches fill
        for name, seconds in USUAL.items():
            jitter = 1 + noise * torch.randn(ranks, generator=generator)
            work = stages if name in ("forward", "backward") else 1.0
            rows[:, column(name)] = seconds * first * work * lasting * jitter.clamp(min=0.5)
        rows[:, column("tokens")], rows[:, column("pairs")] = 4096.0, 4096.0 * 2048
        if shape.sizes["ep"] > 1:
            even = 8192 * (1 + 0.1 * torch.randn(ranks, generator=generator))
            rows[:, column("expert_rows")] = even
        transfer = {name: torch.full((ranks,), seconds) for name, seconds in TRANSFER.items()}
        if fault is not None and step >= fault.since:
            _plant(fault, step, rows, transfer, usual)
        _wait(shape, rows, transfer, generator, noise)
        yield step, rows


def _plant(
    fault: Fault, step: int, rows: torch.Tensor, transfer: dict[str, torch.Tensor], usual: float
) -> None:
    more, ranks = fault.share * usual, list(fault.ranks)
    if fault.kind == "link":
        transfer[fault.section][ranks] += more
    elif fault.kind == "pause":
        if step == fault.since:
            rows[ranks, column("forward")] += more
            rows[ranks, column("gc")] = more if fault.section == "gc" else 0.0
    else:
        rows[ranks, column(fault.section)] += more
        if fault.kind == "data":
            rows[ranks, column("pairs")] *= 1 + 3 * fault.share
        if fault.kind == "experts":
            rows[ranks, column("expert_rows")] *= 3


def _wait(
    shape: RunShape,
    rows: torch.Tensor,
    transfer: dict[str, torch.Tensor],
    generator: torch.Generator,
    noise: float,
) -> None:
    """Fill in what each rank waits for the last of its groups, and the time of the step."""
    late = rows[:, [column(name) for name in SECTIONS]].sum(1)
    for name in ("tp", "cp", "dp", "pp", "world"):
        for group in shape.groups(name):
            if len(group) < 2:
                continue
            last = late[group].max()
            jitter = 1 + noise * torch.randn(len(group), generator=generator)
            waited = last - late[group] + transfer[name][group] * jitter.clamp(min=0.5)
            rows[group, column(f"blocked_{name}")] = waited
            rows[group, column(f"bytes_{name}")] = 1e8
            late[group] += waited
    rows[:, column("step")] = late.max()


def write_run(
    folder: Path, shape: RunShape, count: int, seed: int, fault: Fault | None = None
) -> Path:
    """Write the times of a run; return its folder."""
    writer = TimingsWriter(folder, shape)
    for step, rows in steps(shape, count, random.Random(seed), fault):
        writer.write(step, rows)
    writer.close()
    return folder
