"""What one comparison is made of, and how it is drawn.

A ``Case`` is small and prints as the code that makes it. A ``Space`` says what may be drawn; in
each of its lists the simplest comes first, which is what shrinking goes to.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Some of these are multiples of tiles, vectors and ranks; others are not.
BATCH_SIZES = (2, 4, 1, 3, 6, 8)
SEQ_LENS = (8, 16, 2, 5, 7, 24, 33)


@dataclass(frozen=True)
class Case:
    """One comparison with a single process.

    Attributes:
        mesh: sizes of the mesh's axes by name, outermost first.
        options: settings in addition to the mesh, by name; only ``parallelize`` interprets them.
        model: which of the model factories, where there are several.
        batch_size: sequences of the whole batch.
        seq_len: tokens of a sequence.
        workload: what is special about the batch, a name of ``batches.WORKLOADS``.
        dtype: of the parameters.
        steps: of the optimizer.
        max_norm: to which gradients are clipped; ``None``: they are not.
        seed: of weights, batches and dropout.
    """

    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    batch_size: int = BATCH_SIZES[0]
    seq_len: int = SEQ_LENS[0]
    workload: str = "random"
    dtype: torch.dtype = torch.float64
    steps: int = 1
    max_norm: float | None = None
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks it runs on."""
        return math.prod(self.mesh.values())

    def generator(self, step: int) -> torch.Generator:
        """Return the random numbers of a step's batch, the same on every rank."""
        return torch.Generator().manual_seed(1000 * self.seed + step)

    def code(self) -> str:
        """Return the code that makes this case, without what is as by default."""
        default = Case(mesh={})
        parts = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return f"Case({', '.join(parts)})"

    __str__ = code


@dataclass(frozen=True)
class Space:
    """What may be drawn; the simplest of each comes first."""

    meshes: Sequence[Mapping[str, int]]
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    models: Sequence[str] = ("",)
    batch_sizes: Sequence[int] = BATCH_SIZES
    seq_lens: Sequence[int] = SEQ_LENS
    workloads: Sequence[str] = ("random",)
    dtypes: Sequence[torch.dtype] = (torch.float64,)

    def draw(self, seed: int) -> Iterator[tuple[Case, random.Random]]:
        """Yield cases without end: each combination of model, mesh and options once, then again.

        Sizes, workload, dtype, steps and clipping are drawn for each case. The generator of random
        numbers is yielded with the case; ``redrawn`` draws from it.
        """
        rng = random.Random(seed)
        choices = (self.models, self.meshes, *self.options.values())
        while True:
            for model, mesh, *chosen in _shuffled(choices, rng):
                options = dict(zip(self.options, chosen, strict=True))
                yield self.redrawn(Case(dict(mesh), options, model), rng), rng

    def redrawn(self, case: Case, rng: random.Random) -> Case:
        """Return the case with other sizes, workload, dtype, steps, clipping and seed."""
        return dataclasses.replace(
            case,
            batch_size=rng.choice(self.batch_sizes),
            seq_len=rng.choice(self.seq_lens),
            workload=rng.choice(self.workloads),
            dtype=rng.choice(self.dtypes),
            steps=rng.choice((1, 2)),
            max_norm=rng.choice((None, 0.1)),
            seed=rng.randrange(1 << 16),
        )

    def simpler(self, case: Case) -> Iterator[Case]:
        """Yield cases that differ from one in one thing and are simpler, the simplest first."""
        mesh, options, default = case.mesh, case.options, Case(mesh={})
        changes: list[dict[str, Any]] = []
        if len(mesh) > 1:
            changes += [{"mesh": _without(mesh, axis)} for axis in mesh]
        changes += [{"mesh": {**mesh, axis: n // 2}} for axis, n in mesh.items() if n > 2]
        changes += [{"options": {**options, name: self.options[name][0]}} for name in options]
        changes += [{"options": _without(options, name)} for name in options]
        names = ("workload", "steps", "max_norm", "dtype")
        changes += [{name: getattr(default, name)} for name in names]
        changes.append({"model": self.models[0]})
        for name, sizes in (("batch_size", self.batch_sizes), ("seq_len", self.seq_lens)):
            changes += [{name: size} for size in sorted(sizes) if size < getattr(case, name)]
        changes.append({"seed": 0})
        for change in changes:
            yield dataclasses.replace(case, **change)


def _without(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


def _shuffled(choices: Sequence[Sequence[Any]], rng: random.Random) -> Iterator[Sequence[Any]]:
    """Yield all combinations of one value of each list in a random order.

    Where they are too many, yield single draws for ever.
    """
    if math.prod(map(len, choices)) <= 1 << 16:
        everything = list(itertools.product(*choices))
        rng.shuffle(everything)
        yield from everything
        return
    while True:
        yield [rng.choice(values) for values in choices]
