"""What ran when on each rank of a pipeline, as numbers and as a plot.

Of a recorded step, or computed from a schedule and the costs of its actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusedops._core import checks
from fusedops.parallel.comm.collectives import COMPUTE, Log
from fusedops.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    ScheduleTable,
    table,
)
from fusedops.terminal import svg

_LABEL = re.compile(r"(\d+)([FBIW])(\d+)")
# Of forwards, backwards and their halves; of the second stage of a rank and on darker.
_COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", INPUT: "#eeca3b", WEIGHT: "#54a24b"}
_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "of inputs", WEIGHT: "of weights"}
_LEFT, _TOP, _ROW, _HEIGHT, _WIDTH = 58, 44, 30, 24, 860


@dataclass(frozen=True)
class ActionSpan:
    """An action and its time."""

    action: Action  # what ran
    begin: float  # when, in the unit of the costs or in seconds
    end: float  # until when


@dataclass(frozen=True)
class Timeline:
    """What ran when."""

    spans: tuple[tuple[ActionSpan, ...], ...]  # of each rank, in their order
    title: str = ""  # of the picture

    @property
    def begin(self) -> float:
        """When the first rank began."""
        return min(span.begin for rank in self.spans for span in rank)

    @property
    def end(self) -> float:
        """When the last rank ended."""
        return max(span.end for rank in self.spans for span in rank)

    def bubble(self) -> float:
        """Return the share of all ranks' time in which they computed nothing."""
        busy = sum(span.end - span.begin for rank in self.spans for span in rank)
        return 1.0 - busy / (len(self.spans) * (self.end - self.begin))

    def alive(self) -> list[float]:
        """Return the most micro-batches of which each rank kept activations at a time.

        Of a rank with several stages each counts for its share.
        """
        peaks = []
        for rank in self.spans:
            now, most = 0, 0
            stages = len({span.action.stage for span in rank})
            for span in rank:
                now += span.action.kind == FORWARD
                most = max(most, now)
                now -= span.action.kind in (BACKWARD, WEIGHT)
            peaks.append(most / stages)
        return peaks

    def svg(self) -> str:
        """Return the plot: a row for each rank, a box for each action, bubbles left white."""
        height = _TOP + _ROW * len(self.spans) + 8
        caption = ": ".join(filter(None, (self.title, f"{100 * self.bubble():.1f} % bubbles")))
        parts = [svg.text(8, 20, caption), *self._legend()]
        for rank, spans in enumerate(self.spans):
            y = _TOP + _ROW * rank
            back = {"x": _LEFT, "y": y, "width": _WIDTH, "height": _HEIGHT}
            parts.append(svg.text(8, y + 16, f"rank {rank}"))
            parts.append(svg.element("rect", **back, fill="#f4f4f4"))
            parts += self._row(y, spans)
        return svg.document(_LEFT + _WIDTH + 10, height, caption, parts, heading=False)

    def save(self, path: str | Path) -> None:
        """Write the plot to a file."""
        Path(path).write_text(self.svg())

    def _legend(self) -> Iterator[str]:
        kinds = {span.action.kind for rank in self.spans for span in rank}
        x = _LEFT + _WIDTH - 330
        for kind, name in _NAMES.items():
            if kind in kinds:
                box = {"x": x, "y": 10, "width": 12, "height": 12}
                yield svg.element("rect", **box, fill=_COLOURS[kind])
                yield svg.text(x + 17, 20, name)
                x += 84

    def _row(self, y: int, spans: Sequence[ActionSpan]) -> Iterator[str]:
        scale = _WIDTH / (self.end - self.begin)
        laps = sorted({span.action.stage for span in spans})
        for span in spans:
            kind, stage, microbatch = span.action
            x, width = _LEFT + (span.begin - self.begin) * scale, (span.end - span.begin) * scale
            strength = 1.0 - 0.35 * laps.index(stage) / max(1, len(laps) - 1)
            yield svg.element(
                "rect",
                svg.element("title", svg.quoted(str(span.action))),
                x=x,
                y=y,
                width=width,
                height=_HEIGHT,
                fill=_COLOURS[kind],
                fill_opacity=f"{strength:.2f}",
                stroke="white",
            )
            if width > 14:
                style = {"text_anchor": "middle", "font_size": "10", "fill": "white"}
                yield svg.text(x + width / 2, y + 16, str(microbatch), **style)


def timeline(
    source: str | ScheduleTable | Sequence[Log],
    ranks: int | None = None,
    microbatches: int | None = None,
    *,
    virtual: int | None = None,
    costs: Mapping[str, float] | None = None,
    stages: Sequence[float] | None = None,
    transfer: float = 0.0,
) -> Timeline:
    """Return what runs when on each rank of a pipeline.

    Args:
        source: the name of a schedule or its table, of which the time is computed; or the logs of
            all ranks, in their order, that ``fusedops.parallel.comm.collectives.recorded`` made.
        ranks: of the pipeline, with a name.
        microbatches: of a step, with a name.
        virtual: stages of a rank, with a name; the schedule's own number by default.
        costs: of ``"F"``, ``"I"`` and ``"W"``, the forward and the two parts of the backward of a
            stage of average cost; 1 each by default. A whole backward costs ``I + W``.
        stages: relative cost of each stage; all the same by default.
        transfer: from the end of what is sent to when another rank can use it.

    Returns:
        Its ``bubble()``, ``alive()`` and ``svg()``; ``save(path)`` writes the picture.

    Raises:
        ValueError: there is no such schedule for these sizes, the costs have another number than
            the stages, or a log has nothing of a pipeline.

    Example:
        >>> from fusedops.parallel import timeline
        >>> round(timeline("1f1b", ranks=4, microbatches=8).bubble(), 4)
        0.2727
    """
    if isinstance(source, str):
        if ranks is None or microbatches is None:
            checks.fail("timeline", "ranks and microbatches", "given with a schedule", None)
        source = table(source, ranks, microbatches, virtual)
    if isinstance(source, ScheduleTable):
        return _computed(source, costs or {}, stages, transfer)
    return Timeline(tuple(_recorded(log) for log in source))


def _computed(
    order: ScheduleTable,
    given_costs: Mapping[str, float],
    stages: Sequence[float] | None,
    transfer: float,
) -> Timeline:
    """Let each rank start its next action as soon as what it needs is there."""
    costs = {FORWARD: 1.0, INPUT: 1.0, WEIGHT: 1.0, **given_costs}
    costs[BACKWARD] = costs[INPUT] + costs[WEIGHT]
    factors = [1.0] * order.stages if stages is None else list(stages)
    if len(factors) != order.stages:
        checks.fail("timeline", "stages", f"{order.stages} costs, one a stage", len(factors))
    free = [0.0] * order.ranks
    ended: dict[Action, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in free]
    for rank, action in order.in_order:
        begin = free[rank]
        for need in order.needs(action):
            if need in ended:
                is_remote = order.rank_of(need.stage) != rank
                begin = max(begin, ended[need] + (transfer if is_remote else 0.0))
        free[rank] = ended[action] = begin + costs[action.kind] * factors[action.stage]
        spans[rank].append(ActionSpan(action, begin, free[rank]))
    return Timeline(tuple(map(tuple, spans)), order.schedule.title)


def _recorded(log: Log) -> tuple[ActionSpan, ...]:
    """Return the actions of a rank's log."""
    begun: dict[int, float] = {}
    spans = []
    for event in log.events:
        match = _LABEL.fullmatch(event.label) if event.kind == COMPUTE else None
        if match is None:
            continue
        if event.phase == "start":
            begun[event.number] = event.seconds
        else:
            stage, kind, microbatch = match.groups()
            action = Action(kind, int(stage), int(microbatch))
            spans.append(ActionSpan(action, begun[event.number], event.seconds))
    if not spans:
        checks.fail("timeline", "source", "logs of a pipeline's step", f"rank {log.rank} without")
    return tuple(spans)
