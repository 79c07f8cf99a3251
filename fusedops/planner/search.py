"""Which layouts fit: every way to spread a model over a number of devices, estimated and sorted.

No times are estimated. Layouts that fit are sorted by kinds of cost, the cheapest first: nothing
offloaded, least recomputation, smallest pipeline bubbles, least tensor parallelism (collectives in
each layer), lowest stage of ``zero``, and then by the bytes that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.planner.layout import Layout
from fusedops.planner.memory import Estimate, estimate_unchecked
from fusedops.planner.space import SCHEDULES, LayoutSpace, fitted, refusal
from fusedops.terminal.sizes import show_bytes

CRITERION = (
    "what fits first; then without offload, least recomputation, smallest bubbles, least tensor "
    "parallelism, lowest zero, most bytes left"
)
_MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what it takes."""

    layout: Layout
    estimate: Estimate

    def left(self, memory: int) -> int:
        """Return the bytes that stay free; negative where it does not fit."""
        return memory - self.estimate.peak


@dataclass(frozen=True)
class LayoutRanking:
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


class _Mesh(NamedTuple):
    """Parallel sizes to try: the layouts that have them, or why there are none."""

    options: dict[str, Any]
    variants: tuple[Layout, ...]
    refusal: str = ""


def _meshes(space: LayoutSpace) -> Iterator[_Mesh]:
    """Yield each choice of parallel sizes and schedule."""
    for sizes in space.meshes():
        piped = sizes["pp"] > 1
        for order in space.schedule if piped else ("1f1b",):
            stages = space.virtual if piped else None
            options = {**sizes, "pipeline_schedule": order, "pipeline_virtual": stages}
            try:
                layout = fitted(space.model, space.devices, space.base, options)
                yield _Mesh(options, tuple(space.variants(layout)))
            except ValueError as error:
                yield _Mesh(options, (), refusal(error))


def plan(
    model: TransformerConfig, devices: int, memory: int, base: Layout | None = None, **choices: Any
) -> LayoutRanking:
    """Return every layout on that many devices, what it takes, and which to choose.

    Args:
        model: what is trained.
        devices: how many there are.
        memory: bytes of each.
        base: what is not searched for: precision, micro-batch, kernels and so on.
        **choices: as in ``LayoutSpace``.

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
    space = LayoutSpace(model, devices, base or Layout(), **choices)
    meshes = list(_meshes(space))
    notes = _notes(space, meshes)
    rows = sorted(_estimated(meshes, model), key=lambda row: _cost(row, memory))
    if not rows:
        raise ValueError(f"plan: no layout is possible: {'; '.join(notes)}")
    if rows[0].left(memory) >= 0:
        advice = f"take the first: {describe(rows[0].layout)}"
    else:
        advice = _advice(space, rows, memory)
    return LayoutRanking(tuple(rows), memory, advice, tuple(notes))


def _estimated(meshes: Iterable[_Mesh], model: TransformerConfig) -> Iterator[PlannedLayout]:
    for mesh in meshes:
        for layout in mesh.variants:
            yield PlannedLayout(layout, estimate_unchecked(model, layout))


def _notes(space: LayoutSpace, meshes: Sequence[_Mesh]) -> list[str]:
    """Return why sizes that were asked for are in no layout; without any, at least one."""
    asked = [(name, value) for name in ("tp", "pp", "ep") for value in getattr(space, name)]
    if tuple(space.schedule) != SCHEDULES:
        asked += [("pipeline_schedule", name) for name in space.schedule]
    if space.virtual is not None:
        asked.append(("pipeline_virtual", space.virtual))
    notes = []
    for name, value in asked:
        same = [mesh for mesh in meshes if mesh.options[name] == value]
        if not any(mesh.variants for mesh in same):
            notes += [mesh.refusal for mesh in same][:1]
    if not notes and not any(mesh.variants for mesh in meshes):
        notes = [mesh.refusal for mesh in meshes][:1]
    return list(dict.fromkeys(notes))


def _advice(space: LayoutSpace, rows: Sequence[PlannedLayout], memory: int) -> str:
    """Return what to do where none of the rows fits."""
    least = min(rows, key=lambda row: row.estimate.peak)
    advice = f"nothing fits in {show_bytes(memory)}: the least is "
    advice += f"{show_bytes(least.estimate.peak)} with {describe(least.layout)}"
    more = _fitting_devices(space, memory)
    if more is not None:
        return f"{advice}; {more} such devices would do, or {space.devices} of that size"
    if space.base.training.micro_batch > 1 or space.base.length(space.model) > 1024:
        return f"{advice}; a smaller micro-batch or shorter sequences need less"
    return f"{advice}; take devices of that size"


def _fitting_devices(space: LayoutSpace, memory: int) -> int | None:
    """Return how many devices would do, doubling their number; ``None``: no number would.

    Only choices that can need the least are looked at.
    """
    frugal = replace(
        space,
        schedule=("1f1b",) if tuple(space.schedule) == SCHEDULES else space.schedule,
        offload=[a for a in space.offload if not any(set(a) < set(b) for b in space.offload)],
        zero=sorted(space.zero, reverse=True),
    )

    def fits(devices: int) -> bool:
        meshes = _meshes(replace(frugal, devices=devices))
        return any(row.left(memory) >= 0 for row in _estimated(meshes, space.model))

    # Weights are never off devices.
    fewest = space.model.parameters().total * space.base.bytes_of.weights / memory
    numbers = [space.devices << n for n in range(1, _MOST_DEVICES.bit_length())]
    numbers = [number for number in numbers if fewest <= number <= _MOST_DEVICES]
    # Where the largest number would not do, the smaller ones need not be looked at.
    if not numbers or not fits(numbers[-1]):
        return None
    return next(number for number in numbers if fits(number))


def _cost(row: PlannedLayout, memory: int) -> tuple[float, ...]:
    layout, config, left = row.layout, row.layout.parallel, row.left(memory)
    if left < 0:
        return (1, -left, 0, 0, 0, 0, 0)
    recomputed = {"none": 0, "full": 4}.get(layout.recompute, len(layout.recomputed))
    return (0, len(config.offload), recomputed, layout.bubble, config.tp, config.zero, -left)


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
