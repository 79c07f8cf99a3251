"""The fastest layouts that fit: every layout for a global batch, by the seconds of its step.

A choice of parallel sizes, schedule and micro-batch has a lower bound: its step without
recomputation or offloading, which only add time. Choices are looked at in the order of their
bounds, each with the fastest of its options that fits, until no bound is left below the rows to
return. The first row is therefore the fastest of all, as far as ``step_time`` is right.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.parallel.pipeline.schedules import SCHEDULES as PIPELINES
from fusedops.planner.device import Device
from fusedops.planner.layout import Layout, check_kind, layer_runs
from fusedops.planner.memory import Estimate, estimate_unchecked, layer_bytes
from fusedops.planner.pipelines import stages_of_rank
from fusedops.planner.search import PlannedLayout
from fusedops.planner.shapes import StepShape
from fusedops.planner.space import LayoutSpace, fitted, powers_of_two, refusal
from fusedops.planner.step_time import StepEstimate, step_time

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
class TimedRanking:
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
    check_kind(model)
    config = layout.parallel
    sizes = ("tp", "pp", "dp", "cp", "ep", "microbatches", "virtual")
    options = {name: getattr(config, name) for name in (*sizes, "sp", "offload")}
    offloads = "activations" in config.offload
    return _shape(
        model,
        layout,
        recompute=_recomputed(layout),
        recomputed=_share_of_layers(model, layout),
        rank_layers=_rank_layers(model, layout.runs(model), config.pipeline_schedule, config.pp)
        if config.pp > 1
        else (),
        saved_bytes=layer_bytes(model, layout, 0) if offloads else 0.0,
        micro_batch=layout.training.micro_batch,
        overlap_microbatches=config.overlap_microbatches,
        schedule=config.pipeline_schedule,
        **options,
    )


def _shape(model: TransformerConfig, layout: Layout, **options: Any) -> StepShape:
    training = layout.training
    return StepShape(
        layers=model.num_layers,
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
        dtype=layout.dtype,
        reduce_bytes=layout.reduce_bytes,
        zero=layout.parallel.zero,
        imbalance=training.expert_imbalance,
        **options,
    )


@lru_cache(1024)
def _rank_layers(
    model: TransformerConfig, runs: tuple[range, ...], schedule: str, pp: int
) -> tuple[tuple[int, int], ...]:
    """Return how many layers without and with experts each rank of a pipeline has."""
    ranks = []
    for rank in range(pp):
        stages = stages_of_rank(schedule, pp, len(runs) // pp, rank)
        layers = [layer for stage in stages for layer in runs[stage]]
        sparse = sum(map(model.is_sparse, layers))
        ranks.append((len(layers) - sparse, sparse))
    return tuple(ranks)


def _share_of_layers(model: TransformerConfig, layout: Layout) -> float:
    count = layout.parallel.recompute_layers
    if count is None:
        return 1.0
    return sum(min(count, len(run)) for run in layout.runs(model)) / model.num_layers


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
    micro_batch: Sequence[int] = _MICRO_BATCHES,
    virtual: Sequence[int] = _VIRTUAL,
    **choices: Any,
) -> TimedRanking:
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
        micro_batch: sequences of a micro-batch to try.
        virtual: stages of a rank to try with the interleaved schedule.
        **choices: as in ``LayoutSpace``; by default ``tp`` is tried inside a node, and ``cp`` up to
            16, while a rank has 1,024 tokens.

    Raises:
        ValueError: a number is not positive, or a word has no meaning.
        TypeError: a size is no integer.

    Example:
        >>> from fusedops.planner import fastest, load_device, preset
        >>> ranking = fastest(preset("llama3-8b"), 8, load_device("h100"), 64)
        >>> ranking.rows[0].seconds <= ranking.rows[1].seconds
        True
    """
    for name, values in (
        ("devices", (devices,)),
        ("global_batch", (global_batch,)),
        ("keep", (keep,)),
        ("memory", () if memory is None else (memory,)),
        ("micro_batch", micro_batch),
        ("virtual", virtual),
    ):
        for value in values:
            checks.integer(_OP, name, value, least=1)
    base = base or Layout()
    length = base.length(model)
    usual = {
        "tp": [n for n in powers_of_two(device.links.devices_per_node) if n <= devices],
        "cp": [n for n in _CONTEXT_RANKS if n == 1 or length // n >= _LEAST_TOKENS],
    }
    asked = {name: values for name, values in choices.items() if values}
    search = _TimedSearch(
        LayoutSpace(model, devices, base, **{**usual, **asked}),
        device,
        device.memory.usable if memory is None else memory,
        tuple(virtual),
    )
    return search.plan(list(search.choices(global_batch, micro_batch)), keep)


def _with_layers(layout: Layout, count: int | None) -> Layout:
    """Return a layout of whose stages so many layers recompute, if any do."""
    if layout.parallel.recompute == "none" or count is None:
        return layout
    return layout.replace(recompute_layers=count)


@dataclass
class _TimedSearch:
    """The arguments of ``fastest``, and what was seen."""

    space: LayoutSpace
    device: Device
    memory: int
    virtual: tuple[int, ...]
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    least: PlannedLayout | None = None

    @property
    def model(self) -> TransformerConfig:
        return self.space.model

    @cached_property
    def _bases(self) -> dict[int, Layout]:
        """What is not searched for, with each stage of ZeRO."""
        return {stage: self.space.base.replace(zero=stage) for stage in self.space.zero}

    def choices(self, global_batch: int, micro_batch: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the sizes and micro-batch of every layout that uses all devices."""
        for sizes in self.space.meshes():
            dp, cp = sizes["dp"], sizes["cp"]
            all_devices = dp * cp * sizes["tp"] * sizes["pp"] == self.space.devices
            if not all_devices or global_batch % dp or dp * cp % sizes["ep"]:
                continue
            for rows in micro_batch:
                if global_batch % (dp * rows) == 0:
                    microbatches = global_batch // (dp * rows)
                    yield {**sizes, "micro_batch": rows, "microbatches": microbatches}

    def plan(self, choices: list[dict[str, Any]], keep: int) -> TimedRanking:
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
            row = self._best(choice, rows[keep - 1].seconds if len(rows) >= keep else math.inf)
            examined += 1
            if row is not None:
                rows.append(row)
                rows.sort(key=lambda timed: timed.seconds)
        # What was examined and is in no row is slower than the last row was at that time.
        others = [row.seconds for row in rows[keep - 1 : keep]]
        return TimedRanking(
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
        if pp == 1:
            yield "1f1b", 1
            return
        for name in self.space.schedule:
            counts = (PIPELINES[name].virtual,)
            for count in self.virtual if name == "interleaved" else counts:
                if pp * count <= self.model.num_layers:
                    yield name, count

    def _bound(self, choice: dict[str, Any]) -> float:
        """Return the seconds of a choice with nothing recomputed and nothing offloaded.

        Without a schedule the bubble is left out, and what the stages send.
        """
        stages = self.space.stages(choice["dp"] * choice["cp"])
        # The stages below 3 differ in whether the optimizer is shared alone.
        least = {min(stages), *(stage for stage in stages if stage in (1, 3))}
        if 2 in stages and 1 not in stages:
            least.add(2)
        pp = choice["pp"]
        if pp > 1 and "schedule" in choice:
            balance = self.space.base.parallel.pipeline_balance
            runs = layer_runs(self.model, pp * choice["virtual"], balance)
            ranks = _rank_layers(self.model, runs, choice["schedule"], pp)
            choice = choice | {"rank_layers": ranks}
        times = [
            step_time(_shape(self.model, self._bases[stage], **choice), self.device)
            for stage in least
        ]
        if "schedule" in choice:
            return min(time.seconds for time in times)
        # No split of the layers is better than one in which the ranks share the head evenly, too.
        return min(
            time.seconds
            - sum(time.parts[name] for name in ("bubble", "pipeline"))
            - time.parts["head"] * (1 - 1 / pp)
            for time in times
        )

    def _best(self, choice: dict[str, Any], most: float) -> TimedLayout | None:
        """Return the fastest layout of a choice that fits, if it takes less than ``most``."""
        options = {name: choice[name] for name in ("tp", "pp", "dp", "cp", "ep", "sp")}
        options |= {name: choice[name] for name in ("micro_batch", "microbatches")}
        options["pipeline_schedule"] = choice["schedule"]
        options["pipeline_virtual"] = choice["virtual"] if choice["pp"] > 1 else None
        try:
            plain = fitted(self.model, self.space.devices, self.space.base, options)
        except ValueError as error:
            self.refused[refusal(error)] += 1
            return None
        layouts = list(self.space.variants(plain))
        if not self._can_fit(layouts):
            return None
        bounds = [(self._timed(_with_layers(one, 1))[1].seconds, one) for one in layouts]
        best: TimedLayout | None = None
        for bound, layout in sorted(bounds, key=lambda item: item[0]):
            if most <= bound:
                break
            row = self._with_layers_that_fit(layout)
            if row is not None and row.seconds < most:
                best, most = row, row.seconds
        return best

    def _timed(self, layout: Layout) -> tuple[StepShape, StepEstimate]:
        shape = step_shape(self.model, layout)
        return shape, step_time(shape, self.device)

    def _with_layers_that_fit(self, layout: Layout) -> TimedLayout | None:
        """Return the row of a layout with as few layers recomputing as fit, or ``None``."""
        runs = layout.runs(self.model)
        most = max(map(len, runs))

        def fits(count: int) -> bool:
            return self._fits(estimate_unchecked(self.model, _with_layers(layout, count)))

        count = None
        # With all layers, the backward of the last one allocates more than with all but one.
        if layout.parallel.recompute != "none" and most > 1 and fits(most - 1):
            count = 1 + bisect.bisect_left(range(1, most - 1), True, key=fits)
        several = _with_layers(layout, count)
        needed = estimate_unchecked(self.model, several)
        if not self._fits(needed):
            return None
        if layout.parallel.pp > 1:  # what is estimated, whatever balances the stages
            several = several.replace(pipeline_cuts=tuple(run.start for run in runs[1:]))
        return TimedLayout(several, needed, *self._timed(several))

    def _fits(self, needed: Estimate) -> bool:
        return needed.peak <= self.memory and needed.host <= self.device.links.host_bytes

    def _can_fit(self, layouts: Sequence[Layout]) -> bool:
        """Return whether the variants that take least memory fit."""
        most = max((layout.parallel for layout in layouts), key=lambda c: (c.zero, len(c.offload)))
        longest = max(map(len, layouts[0].runs(self.model)))
        frugal = [
            PlannedLayout(several, estimate_unchecked(self.model, several))
            for layout in layouts
            if (layout.parallel.zero, layout.parallel.offload) == (most.zero, most.offload)
            for several in dict.fromkeys([layout, _with_layers(layout, max(1, longest - 1))])
        ]
        least = min(frugal, key=lambda row: row.estimate.peak)
        if least.estimate.peak <= self.memory:
            return True
        self.too_large += 1
        if self.least is None or least.estimate.peak < self.least.estimate.peak:
            self.least = least
        return False
