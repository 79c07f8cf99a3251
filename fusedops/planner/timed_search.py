"""The fastest layouts that fit: every layout for a global batch, by the seconds of its step.

A choice of parallel sizes, schedule and micro-batch has a lower bound: its step without
recomputation or offloading, which only add time. Choices are looked at in the order of their
bounds, each with the fastest of its options that fits, until no bound is left below the rows to
return. The first row is therefore the fastest of all, as far as ``step_time`` is right.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.parallel.pipeline.schedules import SCHEDULES as PIPELINES
from fusedops.planner.device import Device
from fusedops.planner.layout import Layout, TrainingShape
from fusedops.planner.memory import estimate_unchecked, layer_bytes
from fusedops.planner.search import OFFLOAD, RECOMPUTE, SCHEDULES, PlannedLayout, fitted
from fusedops.planner.step_time import StepEstimate, StepShape, step_time

# Bytes that the CUDA context and the libraries' workspaces take on a device.
CONTEXT_BYTES = 3 << 29
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CONTEXT_RANKS = (1, 2, 4, 8, 16)
# Tokens of a sequence that a context-parallel rank has at least.
_LEAST_TOKENS = 1024
_VIRTUAL = (2, 3, 4, 5, 6, 8)
_OP = "fastest"


@dataclass(frozen=True)
class TimedLayout(PlannedLayout):
    """A layout, what it takes, and the time of its step.

    Attributes:
        layout: the layout.
        estimate: its bytes.
        shape: what its step computes and communicates.
        time: of its step.
    """

    shape: StepShape
    time: StepEstimate

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.time.seconds


@dataclass(frozen=True)
class TimedPlan:
    """The fastest layouts.

    Attributes:
        rows: the fastest first; one for each choice of sizes, schedule and micro-batch.
        device: each of the devices.
        memory: bytes of a device that a step may take.
        choices: how many choices of sizes, schedule and micro-batch there are.
        examined: of how many of them the memory was estimated; the others are slower than ``rows``
            whatever is recomputed.
        bound: seconds below which no layout is that is not in ``rows``.
        refused: how many choices cannot run, by the reason.
        too_large: how many do not fit, whatever is recomputed or offloaded.
        least: the layout of these that takes the least memory, or ``None``.
    """

    rows: tuple[TimedLayout, ...]
    device: Device
    memory: int
    choices: int
    examined: int
    bound: float
    refused: dict[str, int]
    too_large: int
    least: PlannedLayout | None

    @property
    def gap(self) -> float:
        """By how much the first row may be slower than the fastest of all, as a share."""
        return max(0.0, self.rows[0].seconds / self.bound - 1) if self.rows else 0.0


def step_shape(model: TransformerConfig, layout: Layout) -> StepShape:
    """Return what a step of a layout computes and communicates.

    Args:
        model: what is trained.
        layout: how.

    Example:
        >>> from fusedops.planner import Layout, preset, step_shape
        >>> step_shape(preset("llama3-8b"), Layout.of(dp=2, tp=4, sp=True)).tokens
        8192.0
    """
    config = layout.parallel
    names = ("tp", "pp", "dp", "cp", "ep", "sp", "zero", "microbatches", "offload")
    options = {name: getattr(config, name) for name in names}
    options["schedule"], options["virtual"] = config.pipeline_schedule, config.virtual
    offloads = "activations" in config.offload
    return _shape(
        model,
        layout.training,
        recompute=_recomputed(layout),
        saved_bytes=layer_bytes(model, layout, 0) if offloads else 0.0,
        micro_batch=layout.training.micro_batch,
        **options,
    )


def _shape(model: TransformerConfig, training: TrainingShape, **options: Any) -> StepShape:
    return StepShape(
        layers=model.depth,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.kv_heads,
        head_dim=model.size_of_head,
        inner=model.intermediate_size,
        gated=model.gated,
        vocab=model.vocab_size,
        seq_len=training.seq_len or model.seq_len,
        experts=model.num_experts,
        top_k=model.top_k,
        sparse_layers=model.sparse_layers if model.num_experts else None,
        shared=model.shared_size,
        flash=training.kernels != "eager",
        dtype="float32" if training.precision == "float32" else "bfloat16",
        **options,
    )


def _recomputed(layout: Layout) -> str:
    """Return the word of ``StepShape`` for what a layout recomputes."""
    if layout.recompute in ("none", "full"):
        return layout.recompute
    scores = "scores" in layout.recomputed and layout.training.kernels == "eager"
    return "selective" if scores else "elementwise"


def fastest(
    model: TransformerConfig,
    devices: int,
    device: Device,
    global_batch: int,
    *,
    memory: int | None = None,
    base: Layout | None = None,
    keep: int = 10,
    tp: Sequence[int] = (),
    pp: Sequence[int] = (),
    cp: Sequence[int] = (),
    ep: Sequence[int] = (),
    micro_batch: Sequence[int] = _MICRO_BATCHES,
    virtual: Sequence[int] = _VIRTUAL,
    schedule: Sequence[str] = SCHEDULES,
    zero: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[str] = RECOMPUTE,
    offload: Sequence[tuple[str, ...]] = OFFLOAD,
) -> TimedPlan:
    """Return the fastest layouts of a model on devices, for a global batch.

    Args:
        model: what is trained.
        devices: how many there are.
        device: each of them.
        global_batch: sequences of a step, of all devices together.
        memory: bytes of a device that a step may take; by default what the device has, without
            what CUDA takes.
        base: what is not searched for: precision, kernels, length of the sequences.
        keep: how many rows to return.
        tp: sizes to try; by default powers of two inside a node.
        pp: sizes to try; by default divisors of the number of layers.
        cp: sizes to try; by default up to 16, while a rank has 1,024 tokens.
        ep: sizes to try; by default divisors of the number of experts.
        micro_batch: sequences of a micro-batch to try.
        virtual: stages of a rank to try with the interleaved schedule.
        schedule: of pipelines, those to try.
        zero: stages to try.
        recompute: as in ``Layout``, those to try.
        offload: as in ``Layout``, those to try.

    Raises:
        ValueError: a number is not positive, or a word has no meaning.
        TypeError: a size is no integer.

    Example:
        >>> from fusedops.planner import fastest, load_device, preset
        >>> found = fastest(preset("llama3-8b"), 8, load_device("h100"), 64)
        >>> found.rows[0].seconds <= found.rows[1].seconds
        True
    """
    for name, value in (("devices", devices), ("global_batch", global_batch), ("keep", keep)):
        checks.integer(_OP, name, value, least=1)
    if memory is not None:
        checks.integer(_OP, "memory", memory, least=1)
    base = base or Layout()
    length = base.length(model)
    sizes = {
        "tp": tp or [n for n in _powers(device.links.devices_per_node) if n <= devices],
        "pp": pp or [n for n in range(1, model.depth + 1) if model.depth % n == 0],
        "cp": cp or [n for n in _CONTEXT_RANKS if n == 1 or length // n >= _LEAST_TOKENS],
        "ep": ep or [n for n in range(1, max(model.num_experts, 1) + 1) if _splits(model, n)],
        "micro_batch": micro_batch,
        "virtual": virtual,
    }
    for name, values in sizes.items():
        for value in values:
            checks.integer(_OP, name, value, least=1)
    for name in schedule:
        checks.choice(_OP, "schedule", name, PIPELINES)
    variants = _Variants(tuple(zero), tuple(recompute), tuple(tuple(words) for words in offload))
    for stage, words, offloaded in variants.all():  # what has no meaning raises here
        base.replace(zero=stage, recompute=words, offload=offloaded)
    search = _Search(
        model,
        devices,
        device,
        device.memory.bytes - CONTEXT_BYTES if memory is None else memory,
        base,
        variants,
        tuple(schedule),
        tuple(virtual),
    )
    return search.plan(list(_choices(model, devices, global_batch, sizes)), keep)


def _choices(
    model: TransformerConfig,
    devices: int,
    global_batch: int,
    sizes: dict[str, Sequence[int]],
) -> Iterator[dict[str, Any]]:
    """Yield the sizes and micro-batch of every layout that uses all devices."""
    ranks = itertools.product(sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"])
    for tp, pp, cp, ep in ranks:
        dp = devices // (tp * pp * cp)
        if not dp or dp * tp * pp * cp != devices or global_batch % dp or dp * cp % ep:
            continue
        for rows in sizes["micro_batch"]:
            if global_batch % (dp * rows):
                continue
            yield {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "dp": dp,
                "sp": tp > 1,
                "micro_batch": rows,
                "microbatches": global_batch // (dp * rows),
            }


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _splits(model: TransformerConfig, ranks: int) -> bool:
    return ranks == 1 if not model.sparse_layers else model.num_experts % ranks == 0


@dataclass(frozen=True)
class _Variants:
    """What every choice of sizes is tried with."""

    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    offload: tuple[tuple[str, ...], ...]

    def all(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        return itertools.product(self.zero, self.recompute, self.offload)

    def stages(self, ranks: int) -> tuple[int, ...]:
        """Return the stages of ZeRO to try: with nobody to share with all are the same."""
        return self.zero if ranks > 1 else (min(self.zero),)


@dataclass
class _Search:
    """The arguments of ``fastest``, and what was seen."""

    model: TransformerConfig
    devices: int
    device: Device
    memory: int
    base: Layout
    variants: _Variants
    schedules: tuple[str, ...]
    virtual: tuple[int, ...]
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    least: PlannedLayout | None = None

    def plan(self, choices: list[dict[str, Any]], keep: int) -> TimedPlan:
        # First without schedules, whose bubbles only add time: those of slow sizes are never made.
        number = itertools.count()
        bounds = [(self._bound(choice), next(number), choice) for choice in choices]
        heapq.heapify(bounds)
        rows: list[TimedLayout] = []
        examined = 0
        while bounds:
            if len(rows) >= keep and rows[keep - 1].seconds <= bounds[0][0]:
                break
            _, _, choice = heapq.heappop(bounds)
            if "schedule" not in choice:
                for name, stages in self._schedules(choice["pp"]):
                    full = choice | {"schedule": name, "virtual": stages}
                    heapq.heappush(bounds, (self._bound(full), next(number), full))
                continue
            row = self._best(choice)
            examined += 1
            if row is not None:
                rows.append(row)
                rows.sort(key=lambda timed: timed.seconds)
        others = [row.seconds for row in rows[keep : keep + 1]]
        return TimedPlan(
            rows=tuple(rows[:keep]),
            device=self.device,
            memory=self.memory,
            choices=sum(len(list(self._schedules(choice["pp"]))) for choice in choices),
            examined=examined,
            bound=min([*others, *(entry[0] for entry in bounds[:1])], default=math.inf),
            refused=dict(self.refused),
            too_large=self.too_large,
            least=self.least,
        )

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield the schedules of a pipeline with the stages of a rank."""
        if pp == 1:
            yield "1f1b", 1
            return
        for name in self.schedules:
            counts = (PIPELINES[name].virtual,)
            for count in self.virtual if name == "interleaved" else counts:
                if self.model.depth % (pp * count) == 0:
                    yield name, count

    def _bound(self, choice: dict[str, Any]) -> float:
        """Return the seconds of a choice with nothing recomputed and nothing offloaded.

        Without a schedule the bubble is left out, and what the stages send.
        """
        stages = self.variants.stages(choice["dp"] * choice["cp"])
        # The stages below 3 differ in whether the optimizer is shared alone.
        least = {min(stages), *(stage for stage in stages if stage in (1, 3))}
        if 2 in stages and 1 not in stages:
            least.add(2)
        times = [
            step_time(_shape(self.model, self.base.training, zero=stage, **choice), self.device)
            for stage in least
        ]
        waiting = ("bubble", "pipeline") if "schedule" not in choice else ()
        return min(time.seconds - sum(time.parts[name] for name in waiting) for time in times)

    def _best(self, choice: dict[str, Any]) -> TimedLayout | None:
        """Return the fastest layout of a choice that fits, or ``None``."""
        options = {name: choice[name] for name in ("tp", "pp", "dp", "cp", "ep", "sp")}
        options |= {name: choice[name] for name in ("micro_batch", "microbatches")}
        options["pipeline_schedule"] = choice["schedule"]
        options["pipeline_virtual"] = choice["virtual"] if choice["pp"] > 1 else None
        try:
            plain = fitted(self.model, self.devices, self.base, options)
        except ValueError as error:
            self._refuse(error)
            return None
        layouts = list(self._layouts(plain))
        if not layouts or not self._can_fit(layouts):
            return None
        timed = [(step_shape(self.model, layout), layout) for layout in layouts]
        times = [step_time(shape, self.device) for shape, _ in timed]
        for number in sorted(range(len(times)), key=lambda index: times[index].seconds):
            shape, layout = timed[number]
            needed = estimate_unchecked(self.model, layout)
            if needed.peak <= self.memory and needed.host <= self.device.links.host_bytes:
                return TimedLayout(layout, needed, shape, times[number])
        return None

    def _layouts(self, plain: Layout) -> Iterator[Layout]:
        """Yield the variants of a layout that can run."""
        config, refusals = plain.parallel, []
        stages = self.variants.stages(config.sizes.data)
        for stage, words, offloaded in self.variants.all():
            if stage not in stages:
                continue
            try:
                yield plain.replace(zero=stage, recompute=words, offload=offloaded)
            except ValueError as error:
                refusals.append(error)
        if len(refusals) == len(stages) * len(self.variants.recompute) * len(self.variants.offload):
            self._refuse(refusals[0])

    def _can_fit(self, layouts: Sequence[Layout]) -> bool:
        """Return whether the variants that take least memory fit."""
        most = max((layout.parallel for layout in layouts), key=lambda c: (c.zero, len(c.offload)))
        frugal = [
            PlannedLayout(layout, estimate_unchecked(self.model, layout))
            for layout in layouts
            if (layout.parallel.zero, layout.parallel.offload) == (most.zero, most.offload)
        ]
        least = min(frugal, key=lambda row: row.estimate.peak)
        if least.estimate.peak <= self.memory:
            return True
        self.too_large += 1
        if self.least is None or least.estimate.peak < self.least.estimate.peak:
            self.least = least
        return False

    def _refuse(self, error: ValueError) -> None:
        reason = str(error).removeprefix("plan: ").removeprefix("ParallelConfig: ")
        self.refused[reason] += 1
