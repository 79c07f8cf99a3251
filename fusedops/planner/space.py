"""Every layout of a model on a number of devices: what the searches of this package enumerate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.parallel.sizes import check_experts
from fusedops.planner.layout import Layout, check

# Tensor parallelism across more than one machine's devices is not proposed.
MOST_TENSOR = 8
RECOMPUTE = ("none", "selective", "full")
# The others have the bubbles of one of these and keep no less.
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "zbv")
OFFLOAD: tuple[tuple[str, ...], ...] = ((), ("optimizer",), ("optimizer", "activations"))


@dataclass(frozen=True)
class LayoutSpace:
    """The layouts of a model on a number of devices.

    Attributes:
        model: what is trained.
        devices: how many there are.
        base: where all else comes from; ``sp`` goes with tensor parallelism (and does what
            ``recompute_slice_activation`` does without it).
        tp: sizes to try; powers of two up to ``MOST_TENSOR`` by default.
        pp: sizes to try; up to the number of layers by default.
        cp: sizes to try; that of ``base`` by default.
        ep: sizes to try; divisors of the number of experts by default.
        zero: stages to try.
        recompute: as in ``Layout``, those to try.
        offload: as in ``Layout``, those to try.
        schedule: of pipelines, those to try; one stage has none, and is tried once.
        virtual: stages of a rank of a pipeline; the schedule's own number by default.

    Raises:
        ValueError: a value that is to be tried has no meaning for any model.
        TypeError: a size is no integer.
    """

    model: TransformerConfig
    devices: int
    base: Layout
    tp: Sequence[int] = ()
    pp: Sequence[int] = ()
    cp: Sequence[int] = ()
    ep: Sequence[int] = ()
    zero: Sequence[int] = (0, 1, 2, 3)
    recompute: Sequence[str] = RECOMPUTE
    offload: Sequence[tuple[str, ...]] = OFFLOAD
    schedule: Sequence[str] = SCHEDULES
    virtual: int | None = None

    def __post_init__(self) -> None:
        checks.integer("plan", "devices", self.devices, least=1)
        if self.virtual is not None:
            checks.integer("plan", "pipeline_virtual", self.virtual, least=1)
        base = self.base.replace(recompute_slice_activation=False)
        object.__setattr__(self, "base", base)
        # What only does not fit is passed over, what has no meaning is not.
        for name in ("tp", "pp", "cp", "ep"):
            for size in getattr(self, name):
                checks.integer("plan", name, size, least=1)
        for name in ("zero", "recompute", "offload", "schedule"):
            for value in getattr(self, name):
                base.replace(**{"pipeline_schedule" if name == "schedule" else name: value})

    def meshes(self) -> Iterator[dict[str, Any]]:
        """Yield sizes to try, as options of ``Layout``; the devices or the model may not fit."""
        sizes = itertools.product(
            self.tp or powers_of_two(MOST_TENSOR),
            self.pp or range(1, min(self.devices, self.model.num_layers) + 1),
            self.cp or (self.base.parallel.cp,),
        )
        for tp, pp, cp in sizes:
            dp = max(1, self.devices // (tp * pp * cp))
            for ep in self.ep or self._expert_ranks(dp * cp):
                yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sp": tp > 1}

    def _expert_ranks(self, ranks: int) -> list[int]:
        experts = self.model.num_experts if self.model.sparse_layers else 1
        common = math.gcd(ranks, experts)
        return [size for size in range(1, common + 1) if common % size == 0]

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """Yield a layout with each stage of ZeRO, recomputation and offloading."""
        stages = self.stages(layout.parallel.sizes.data)
        for zero, recompute, offload in itertools.product(stages, self.recompute, self.offload):
            yield layout.replace(zero=zero, recompute=recompute, offload=offload)

    def stages(self, ranks: int) -> Sequence[int]:
        """Return the stages of ZeRO to try: with nobody to share with all are the same."""
        return self.zero if ranks > 1 else (min(self.zero),)


def fitted(model: TransformerConfig, devices: int, base: Layout, options: dict[str, Any]) -> Layout:
    """Return the layout of parallel sizes; raise a ``ValueError`` where they do not fit."""
    layout = base.replace(**options | {"dp": options["ep"]})
    check(model, layout)
    sizes = (layout.parallel.tp, layout.parallel.pp, layout.parallel.cp)
    if devices % math.prod(sizes):
        product = f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}"
        raise ValueError(f"tp x pp x cp = {product} must divide the {devices} devices")
    check_experts("plan", options["ep"], options["dp"] * layout.parallel.cp)
    return layout.replace(dp=options["dp"])


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to ``most``."""
    return [1 << n for n in range(most.bit_length())]


def refusal(error: ValueError) -> str:
    """Return why a layout does not fit, without the name of the function that found it."""
    return str(error).removeprefix("plan: ").removeprefix("ParallelConfig: ")
