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

    def __str__(self) -> str:
        return self.code()


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
    steps: Sequence[int] = (1, 2)
    max_norms: Sequence[float | None] = (None, 0.1)

    def combinations(self) -> int:
        """How many combinations of model, mesh and options there are."""
        return len(self.models) * len(self.meshes) * math.prod(map(len, self.options.values()))

    def draw(self, seed: int) -> Iterator[tuple[Case, random.Random]]:
        """Yield cases without end: each combination of model, mesh and options once, then again.

        Sizes, workload, dtype, steps and clipping are drawn for each case. The generator of random
        numbers is yielded with the case; ``redrawn`` draws from it.
        """
        rng = random.Random(seed)
        choices = (self.models, self.meshes, *self.options.values())
        while True:
            for model, mesh, *chosen in _shuffled([len(values) for values in choices], rng):
                places = zip(self.options, chosen, strict=True)
                case = Case(
                    mesh=dict(self.meshes[mesh]),
                    options={name: self.options[name][place] for name, place in places},
                    model=self.models[model],
                )
                yield self.redrawn(case, rng), rng

    def redrawn(self, case: Case, rng: random.Random) -> Case:
        """Return the case with other sizes, workload, dtype, steps, clipping and seed."""
        return dataclasses.replace(
            case,
            batch_size=rng.choice(self.batch_sizes),
            seq_len=rng.choice(self.seq_lens),
            workload=rng.choice(self.workloads),
            dtype=rng.choice(self.dtypes),
            steps=rng.choice(self.steps),
            max_norm=rng.choice(self.max_norms),
            seed=rng.randrange(1 << 16),
        )


def _shuffled(sizes: Sequence[int], rng: random.Random) -> Iterator[Sequence[int]]:
    """Yield all combinations of an index below each size in a random order.

    Where they are too many, yield single draws for ever.
    """
    if math.prod(sizes) <= 1 << 16:
        everything = list(itertools.product(*map(range, sizes)))
        rng.shuffle(everything)
        yield from everything
        return
    while True:
        yield [rng.randrange(size) for size in sizes]
