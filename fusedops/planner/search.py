"""Which layouts fit: every way to spread a model over a number of devices, estimated and sorted.

No times are estimated. Layouts that fit are sorted by kinds of cost, the cheapest first: nothing
offloaded, least recomputation, smallest pipeline bubbles, least tensor parallelism (collectives in
each layer), lowest stage of ``zero``, and then by the bytes that are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.parallel.sizes import check_experts
from fusedops.planner.layout import Layout, check
from fusedops.planner.memory import Estimate, estimate_unchecked
from fusedops.planner.sizes import show_bytes

CRITERION = (
    "what fits first; then without offload, least recomputation, smallest bubbles, least tensor "
    "parallelism, lowest zero, most bytes left"
)
# Tensor parallelism across more than one machine's devices is not proposed.
MOST_TENSOR = 8
_MOST_DEVICES = 1 << 16
RECOMPUTE = ("none", "selective", "full")
# The others have the bubbles of one of these and keep no less.
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "zbv")
OFFLOAD: tuple[tuple[str, ...], ...] = ((), ("optimizer",), ("optimizer", "activations"))


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what it takes."""

    layout: Layout
    estimate: Estimate

    def left(self, memory: int) -> int:
        """Return the bytes that stay free; negative where it does not fit."""
        return memory - self.estimate.peak


@dataclass(frozen=True)
class Plan:
    """The layouts that are possible, and which to take.

    Attributes:
        rows: sorted by ``CRITERION``.
        memory: bytes of a device.
        advice: one sentence: which layout to take, or what to do where none fits.
        notes: for each size that was asked for and that no layout has, one sentence that says why.
    """

    rows: tuple[PlannedLayout, ...]
    memory: int
    advice: str
    notes: tuple[str, ...] = ()

    @property
    def fitting(self) -> int:
        """How many fit; they come first."""
        return sum(row.left(self.memory) >= 0 for row in self.rows)


def layouts(
    model: TransformerConfig,
    devices: int,
    base: Layout,
    *,
    tp: Sequence[int] = (),
    pp: Sequence[int] = (),
    ep: Sequence[int] = (),
    zero: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str] = RECOMPUTE,
    offload: Sequence[tuple[str, ...]] = OFFLOAD,
    schedule: Sequence[str] = SCHEDULES,
    virtual: int | None = None,
) -> Iterator[Layout]:
    """Yield every layout on that many devices that fits the model's sizes.

    Args:
        model: what is trained.
        devices: how many there are.
        base: where all else comes from; its ``cp`` is kept, ``sp`` goes with tensor parallelism
            (and does what ``recompute_slice_activation`` does without it).
        tp: sizes to try; powers of two up to ``MOST_TENSOR`` by default.
        pp: sizes to try; divisors of the number of layers by default.
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
    checks.integer("plan", "devices", devices, least=1)
    base = base.replace(recompute_slice_activation=False)
    # What only does not fit is passed over, what has no meaning is not.
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "ep": ep}
    for name, values in sizes.items():
        for size in values:
            checks.integer("plan", name, size, least=1)
    options: dict[str, Sequence[Any]] = {"zero": zero, "recompute": recompute, "offload": offload}
    for name, values in (options | {"pipeline_schedule": schedule}).items():
        for value in values:
            base.replace(**{name: value})
    if virtual is not None:
        checks.integer("plan", "pipeline_virtual", virtual, least=1)
    for mesh in _meshes(model, devices, base, **sizes, schedule=schedule, virtual=virtual):
        if mesh.layout is None:
            continue
        # With nobody to share with all stages of zero are the same.
        stages = zero if mesh.layout.parallel.sizes.data > 1 else (min(zero),)
        for stage, words, offloaded in itertools.product(stages, recompute, offload):
            yield mesh.layout.replace(zero=stage, recompute=words, offload=offloaded)


class _MeshChoice(NamedTuple):
    """Parallel sizes to try: their layout, or why it is impossible."""

    options: dict[str, Any]
    layout: Layout | None
    refusal: str = ""


def _meshes(
    model: TransformerConfig,
    devices: int,
    base: Layout,
    *,
    tp: Sequence[int] = (),
    pp: Sequence[int] = (),
    ep: Sequence[int] = (),
    schedule: Sequence[str] = SCHEDULES,
    virtual: int | None = None,
    **_: Any,
) -> Iterator[_MeshChoice]:
    """Yield each choice of parallel sizes; arguments as of ``layouts``."""
    tensor = tp or powers_of_two(MOST_TENSOR)
    stages = pp or range(1, min(devices, model.depth) + 1)
    cp = base.parallel.cp
    for t, p in itertools.product(tensor, stages):
        replicas = max(1, devices // (t * p * cp))
        shares = ep or [
            n for n in range(1, max(model.num_experts, 1) + 1) if _divides(n, replicas * cp, model)
        ]
        for order, e in itertools.product(schedule if p > 1 else ("1f1b",), shares):
            options = {
                "dp": replicas,
                "tp": t,
                "pp": p,
                "ep": e,
                "sp": t > 1,
                "pipeline_schedule": order,
                "pipeline_virtual": virtual if p > 1 else None,
            }
            try:
                yield _MeshChoice(options, fitted(model, devices, base, options))
            except ValueError as error:
                refusal = str(error).removeprefix("plan: ").removeprefix("ParallelConfig: ")
                yield _MeshChoice(options, None, refusal)


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


def _divides(size: int, ranks: int, model: TransformerConfig) -> bool:
    if not model.sparse_layers:
        return size == 1
    return ranks % size == 0 and model.num_experts % size == 0


def plan(
    model: TransformerConfig, devices: int, memory: int, base: Layout | None = None, **choices: Any
) -> Plan:
    """Return every layout on that many devices, what it takes, and which to choose.

    Args:
        model: what is trained.
        devices: how many there are.
        memory: bytes of each.
        base: what is not searched for: precision, micro-batch, kernels and so on.
        **choices: as in ``layouts``.

    Raises:
        ValueError: no layout on that many devices fits the model's sizes, or a value to try has no
            meaning.
        TypeError: a size is no integer.

    Example:
        >>> from fusedops.planner import plan, preset
        >>> result = plan(preset("gpt2"), devices=1, memory=16 << 30)
        >>> result.rows[0].layout.recompute
        'none'
    """
    checks.integer("plan", "memory", memory, least=1)
    return _Search(model, devices, memory, base or Layout(), choices).plan()


@dataclass(frozen=True)
class _Search:
    """The arguments of ``plan``."""

    model: TransformerConfig
    devices: int
    memory: int
    base: Layout
    choices: dict[str, Any]

    def plan(self) -> Plan:
        rows = list(self.rows())
        notes = self.notes([row.layout for row in rows])
        if not rows:
            raise ValueError(f"plan: no layout is possible: {'; '.join(notes)}")
        rows.sort(key=lambda row: _cost(row, self.memory))
        if rows[0].left(self.memory) >= 0:
            advice = f"take the first: {describe(rows[0].layout)}"
        else:
            advice = self.advice(rows)
        return Plan(tuple(rows), self.memory, advice, tuple(notes))

    def rows(self) -> Iterator[PlannedLayout]:
        for layout in layouts(self.model, self.devices, self.base, **self.choices):
            yield PlannedLayout(layout, estimate_unchecked(self.model, layout))

    def notes(self, used: Sequence[Layout]) -> list[str]:
        """Return why sizes that were asked for are in no layout; without any, at least one."""
        choices = self.choices
        meshes = list(_meshes(self.model, self.devices, self.base, **choices))
        asked = [(name, value) for name in ("tp", "pp", "ep") for value in choices.get(name, ())]
        if tuple(choices.get("schedule", SCHEDULES)) != SCHEDULES:
            asked += [("pipeline_schedule", name) for name in choices["schedule"]]
        if choices.get("virtual") is not None:
            asked.append(("pipeline_virtual", choices["virtual"]))
        notes = []
        for name, value in asked:
            if not any(getattr(layout.parallel, name) == value for layout in used):
                refusals = (mesh.refusal for mesh in meshes if mesh.options[name] == value)
                notes += [refusal for refusal in refusals if refusal][:1]
        if not used and not notes:
            notes = [mesh.refusal for mesh in meshes][:1]
        return list(dict.fromkeys(notes))

    def advice(self, rows: list[PlannedLayout]) -> str:
        """Return what to do where none of the rows fits."""
        least = min(rows, key=lambda row: row.estimate.peak)
        needed = show_bytes(least.estimate.peak)
        advice = f"nothing fits in {show_bytes(self.memory)}: the least is {needed}"
        advice += f" with {describe(least.layout)}"
        more = self.fitting_devices()
        if more is not None:
            return f"{advice}; {more} such devices would do, or {self.devices} of that size"
        if self.base.training.micro_batch > 1 or self.base.length(self.model) > 1024:
            return f"{advice}; a smaller micro-batch or shorter sequences need less"
        return f"{advice}; take devices of that size"

    def fitting_devices(self) -> int | None:
        """Return how many devices would do, doubling their number; ``None``: no number would.

        Only choices that can need the least are looked at. With more devices nothing grows on each
        of them but the buffers of their communication: where the largest number would not do
        without these, no smaller one does with them.
        """
        offload = self.choices.get("offload", OFFLOAD)
        choices = {"schedule": ("1f1b",)} | self.choices  # one of those that keep least
        choices["offload"] = [a for a in offload if not any(set(a) < set(b) for b in offload)]
        choices["zero"] = sorted(choices.get("zero", (0, 1, 2, 3)), reverse=True)
        numbers = [self.devices << n for n in range(1, _MOST_DEVICES.bit_length())]
        searches = [
            replace(self, devices=number, choices=choices)
            for number in numbers
            if number <= _MOST_DEVICES
        ]
        if not searches or all(
            row.left(self.memory) + row.estimate.parts["communication"] < 0
            for row in searches[-1].rows()
        ):
            return None
        weights = self.model.parameters().total * self.base.bytes_of.weights  # never off devices
        fewest = fewest_devices(weights, self.memory)
        for search in searches:
            if search.devices >= fewest and any(
                row.left(self.memory) >= 0 for row in search.rows()
            ):
                return search.devices
        return None


def _cost(row: PlannedLayout, memory: int) -> tuple[float, ...]:
    layout, config, left = row.layout, row.layout.parallel, row.left(memory)
    if left < 0:
        return (1, -left, 0, 0, 0, 0, 0)
    recomputed = {"none": 0, "full": 4}.get(layout.recompute, len(layout.recomputed))
    return (0, len(config.offload), recomputed, layout.bubble, config.tp, config.zero, -left)


def fewest_devices(size: float, memory: float) -> int:
    """Return how many devices hold so many bytes, if nothing but that is in them.

    Example:
        >>> fewest_devices(3500e9, 32e9)
        110
    """
    return math.ceil(size / memory)


def describe(layout: Layout) -> str:
    """Return what distinguishes a layout, in a line.

    Example:
        >>> describe(Layout.of(dp=2, tp=4, zero=1))
        'dp 2, tp 4, zero 1'
    """
    config = layout.parallel
    sizes = {name: getattr(config, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if config.pp > 1:
        parts[parts.index(f"pp {config.pp}")] += f" ({config.pipeline_schedule})"
    if config.zero:
        parts.append(f"zero {config.zero}")
    if layout.recompute != "none":
        count = config.recompute_layers
        layers = "" if count is None else f" of {count} layers per stage"
        parts.append(f"recompute {layout.recompute}{layers}")
    if config.offload:
        parts.append(f"offload {' and '.join(config.offload)}")
    return ", ".join(parts) or "one device, nothing shared"
