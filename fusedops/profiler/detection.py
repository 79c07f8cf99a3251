"""Finds what makes a job slow while it runs: rank, stage, link, data, experts, pauses, memory.

A rank is judged by its own time, in which it waits for nobody: the one that arrives late is named,
never those that wait for it. It is compared with its peers, the ranks of the same pipeline stage,
which have the same work; a stage is compared with what it took before. A link is judged by what the
last rank to arrive at a collective waits, which is the transfer alone.

A deviation counts when it is larger than a threshold and than the noise of this job: the median
absolute deviation of the same quantity over the last steps and all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedops.profiler.timings import GROUPS, REGULAR, RunShape, Timings, column

# Deviations in units of a normal distribution's standard deviation: median absolute deviations
# times this number.
_NORMAL = 1.4826
_PEER_SECTIONS = [column(name) for name in REGULAR]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From where on a deviation is a finding.

    Attributes:
        slow: share of its peers' time by which a rank or a stage is slower.
        severe: the share from which on a finding is a warning; below it is a note. The cluster
            analysis of MindSpore reports from 0.2 on.
        link: share of a step by which a group's transfers are longer.
        pause: share of a step that one pause takes.
        pause_seconds: that a pause takes at least.
        memory: share by which memory grows within ``window`` steps.
        imbalance: rows of the experts with most, by their mean.
        noise: how many standard deviations of the noise a deviation has at least.
        window: steps of which the median is taken.
        chronic: steps of a window with the same deviation, from which on it is chronic.
        warm_up: first steps, which count for nothing: caches fill, kernels are tuned.
    """

    slow: float = 0.06
    severe: float = 0.2
    link: float = 0.06
    pause: float = 0.3
    pause_seconds: float = 0.05
    memory: float = 0.05
    imbalance: float = 2.0
    noise: float = 3.5
    window: int = 8
    chronic: int = 5
    warm_up: int = 3


@dataclass(frozen=True)
class Finding:
    """What makes a job slow.

    Attributes:
        kind: ``"rank"``, ``"stage"``, ``"link"``, ``"data"``, ``"experts"``, ``"pause"`` or
            ``"memory"``.
        ranks: those that cause it: one, those of a stage, or those of a process group.
        section: of the step, a name of ``REGULAR``; of a link the kind of parallelism.
        factor: how many times what is usual.
        since: the first step that shows it.
        step: at which it was found.
        chronic: whether it lasts; a pause happens once.
        severe: whether it is a warning.
        seconds: that it adds to a step.
        advice: what to do.
    """

    kind: str
    ranks: tuple[int, ...]
    section: str
    factor: float
    since: int
    step: int
    chronic: bool
    severe: bool
    seconds: float
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence()}; {self.advice}"

    def sentence(self) -> str:
        """Return what was found, in a line."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {listed(self.ranks)}"
        since = f"since step {self.since}" if self.chronic else f"at step {self.since}"
        cost = f"{1e3 * self.seconds:.0f} ms a step"
        return {
            "rank": f"{who} is {self.factor:.2f}x as slow as its peers ({self.section}), {cost}",
            "stage": f"the pipeline stage of {who} is {self.factor:.2f}x as slow as before "
            f"({self.section}), {cost}",
            "link": f"the {self.section} group of {who} takes {self.factor:.2f}x as long to "
            f"transfer, {cost}",
            "data": f"{who} has {self.factor:.2f}x the attention work of its peers, {cost}",
            "experts": f"the experts of {who} get {self.factor:.2f}x the mean of all rows, {cost}",
            "pause": f"{who} paused for {1e3 * self.seconds:.0f} ms in {self.section}",
            "memory": f"the memory of {who} grows: {self.factor:.2f}x within the last steps",
        }[self.kind] + f", {since}"

    def record(self) -> dict[str, Any]:
        """Return it as a line of ``findings.jsonl``."""
        return {**asdict(self), "ranks": list(self.ranks), "sentence": self.sentence()}


_ADVICE = {
    "rank": "compare its machine with others: clocks, temperature, other processes, ECC errors",
    "data": "balance the documents: give all ranks sequences of similar lengths",
    "input": "its input is slow: look at its disk and network, or prefetch more batches",
    "optimizer": "its optimizer is slow: look at the host's memory bandwidth and its threads",
    "stage": "move layers away from the stage: parallel.pipeline_cuts, or a plan's",
    "link": "look at the cable, the port and the congestion of its network: fusedops bench "
    "communication --links measures each link",
    "experts": "raise the balance loss, or use the balancing bias (docs/routing.md)",
    "gc": "call gc.freeze() after the start, or gc.disable() and collect between steps",
    "pause": "look at what else runs on its machine at that time",
    "memory": "something keeps tensors: losses without .item(), growing caches or lists",
}


class Detector:
    """Looks at the rows of all ranks, step by step, and tells what is new.

    Args:
        shape: of the run.
        thresholds: from where on a deviation is a finding.

    Example:
        >>> import torch
        >>> from fusedops.profiler import Detector, RunShape
        >>> from fusedops.profiler.timings import FIELDS, column
        >>> rows = torch.zeros(4, len(FIELDS))
        >>> rows[:, column("step")] = rows[:, column("forward")] = 1.0
        >>> rows[2, column("forward")] = 1.5
        >>> detector = Detector(RunShape(dict(pp=1, dp=4, cp=1, tp=1, ep=1)))
        >>> findings = [finding for step in range(1, 12) for finding in detector.update(step, rows)]
        >>> [(finding.kind, finding.ranks, finding.section) for finding in findings]
        [('rank', (2,), 'forward')]
    """

    def __init__(self, shape: RunShape, thresholds: Thresholds | None = None) -> None:
        self.shape, self.thresholds = shape, thresholds or Thresholds()
        window = self.thresholds.window
        self._steps: deque[int] = deque(maxlen=window)
        self._rows: deque[torch.Tensor] = deque(maxlen=window)
        self._seen = 0
        self._reported: dict[tuple[Any, ...], int] = {}
        self._usual: torch.Tensor | None = None  # rows of the first window: what was usual
        self._first: list[torch.Tensor] = []
        # Pauses of the last step, which may turn out to last, and all ranks that were late then.
        self._standing: list[Finding] = []
        self._late: set[int] = set()
        ranks = range(shape.ranks)
        stages = torch.tensor([shape.stage_of(rank) for rank in ranks])
        self._stages = [(stages == stage).nonzero().flatten() for stage in range(shape.sizes["pp"])]

    def update(self, step: int, rows: torch.Tensor) -> list[Finding]:
        """Return what a step shows for the first time.

        Args:
            step: its number.
            rows: float32 ``[ranks, fields]``.
        """
        self._seen += 1
        if self._seen <= self.thresholds.warm_up:
            return []
        self._steps.append(step)
        self._rows.append(rows)
        findings = self._pauses(rows)
        usual = self._usual
        if usual is None:
            self._first.append(rows)
            if len(self._first) == self.thresholds.window:
                self._usual = torch.stack(self._first).median(dim=0).values
        if len(self._rows) >= self.thresholds.chronic:
            window = torch.stack(list(self._rows))
            findings += self._slow_ranks(window)
            if usual is not None:
                findings += self._slow_stages(window, usual)
                findings += self._slow_links(window, usual)
                findings += self._growing_memory(window)
        return self._new(findings)

    def _new(self, findings: list[Finding]) -> list[Finding]:
        """Return those that were not reported in the last window."""
        new = []
        for finding in findings:
            key = (finding.kind, finding.ranks, finding.section)
            before = self._reported.get(key)
            self._reported[key] = finding.step
            if before is None or finding.step - before > self.thresholds.window:
                new.append(finding)
        return new

    def _slow_ranks(self, window: torch.Tensor) -> list[Finding]:
        findings = []
        own = window[:, :, _PEER_SECTIONS].sum(2)  # [W, R]
        for ranks in self._stages:
            if len(ranks) < 2:
                continue
            of_peers = own[:, ranks]
            excess = of_peers / _lower_median(of_peers, 1) - 1
            for place, since, median in self._lasting(self.thresholds.slow, excess):
                findings.append(self._slow_rank(window, ranks, int(ranks[place]), since, median))
        return findings

    def _slow_rank(
        self, window: torch.Tensor, ranks: torch.Tensor, rank: int, since: int, excess: float
    ) -> Finding:
        """Return why a rank is slower than its peers."""
        sections = window[:, :, _PEER_SECTIONS]
        more = (
            (sections[:, rank] - _lower_median(sections[:, ranks], 1).squeeze(1)).median(0).values
        )
        section = REGULAR[int(more.argmax())]
        kind, factor = "rank", 1 + excess
        advice = {"data": "input", "optimizer": "optimizer"}.get(section, "rank")
        work = {
            "data": window[:, :, column("pairs")] + window[:, :, column("tokens")],
            "experts": window[:, :, column("expert_rows")],
        }
        for name, amount in work.items():
            share = amount[:, rank] / _lower_median(amount[:, ranks], 1).squeeze(1).clamp(min=1)
            most = self.thresholds.imbalance if name == "experts" else 1 + self.thresholds.slow
            if section in ("forward", "backward") and float(share.median()) > most:
                kind, factor, advice = name, float(share.median()), name
        return self._chronic(
            kind, (rank,), section, factor, since, excess, float(more.sum()), advice
        )

    def _slow_stages(self, window: torch.Tensor, usual: torch.Tensor) -> list[Finding]:
        """Return stages all of whose ranks are slower than before, other stages are not."""
        if len(self._stages) < 2:
            return []
        own = window[:, :, _PEER_SECTIONS]
        before = usual[:, _PEER_SECTIONS]
        times = torch.cat([_lower_median(own[:, ranks].sum(2), 1) for ranks in self._stages], 1)
        usually = torch.stack([before[ranks].sum(1).median() for ranks in self._stages])
        growth = times / usually  # [W, stages]
        excess = growth / _lower_median(growth, 1) - 1
        findings = []
        for stage, since, median in self._lasting(self.thresholds.slow, excess):
            ranks = self._stages[stage]
            more = own[:, ranks].median(1).values.median(0).values - before[ranks].median(0).values
            kind, section = "stage" if len(ranks) > 1 else "rank", REGULAR[int(more.argmax())]
            of_stage, seconds = tuple(ranks.tolist()), float(more.sum())
            findings.append(
                self._chronic(kind, of_stage, section, 1 + median, since, median, seconds, kind)
            )
        return findings

    def _slow_links(self, window: torch.Tensor, usual: torch.Tensor) -> list[Finding]:
        """Return groups whose transfers take longer than before, or than those of other groups."""
        findings = []
        seconds = window[:, :, column("step")].median(1).values
        for name in GROUPS:
            if not bool(window[:, :, column(f"bytes_{name}")].any()):
                continue
            groups = self.shape.groups(name)
            if len(groups[0]) < 2:
                continue
            # What the last to arrive waits is the transfer.
            waits = window[:, :, column(f"blocked_{name}")]
            transfer = torch.stack([waits[:, group].min(1).values for group in groups], 1)
            before = torch.stack(
                [usual[group, column(f"blocked_{name}")].min() for group in groups]
            )
            if len(groups) > 2:  # a link that was slow from the start is slower than others
                before = torch.minimum(before, transfer.median(0).values.median())
            more = (transfer - before) / seconds[:, None]
            for number, since, median in self._lasting(self.thresholds.link, more):
                ranks, took = tuple(groups[number]), transfer[:, number]
                extra = float((took - before[number]).median())
                factor = float(took.median() / before[number].clamp(min=1e-6))
                findings.append(
                    self._chronic("link", ranks, name, factor, since, median, extra, "link")
                )
        return findings

    def _pauses(self, rows: torch.Tensor) -> list[Finding]:
        """Return ranks that stood still in the step before, and do not any more.

        By Python's collector, or by what nobody sees.
        """
        if len(self._rows) <= self.thresholds.chronic:
            return []
        step = self._steps[-1]
        window = torch.stack(list(self._rows)[:-1])
        seconds = float(window[:, :, column("step")].median())
        more = rows[:, _PEER_SECTIONS] - window[:, :, _PEER_SECTIONS].median(0).values
        least = max(self.thresholds.pause * seconds, self.thresholds.pause_seconds)
        late = more.sum(1) > least
        ended = [finding for finding in self._standing if not late[finding.ranks[0]]]
        self._standing = []
        before, self._late = self._late, set(late.nonzero().flatten().tolist())
        for rank in self._late - before:
            lost = float(more[rank].sum())
            collected = float(rows[rank, column("gc")]) > lost / 2
            section = "gc" if collected else REGULAR[int(more[rank].argmax())]
            severe = lost > self.thresholds.severe * seconds
            advice = _ADVICE["gc" if collected else "pause"]
            factor = 1 + lost / seconds
            self._standing.append(
                Finding(
                    "pause", (rank,), section, factor, step, step + 1, False, severe, lost, advice
                )
            )
        return ended

    def _growing_memory(self, window: torch.Tensor) -> list[Finding]:
        memory = window[:, :, column("memory")]
        growth = memory[-1] / memory[0].clamp(min=1) - 1
        rises = (memory.diff(dim=0) > 0).sum(0) >= len(memory) - 2
        findings = []
        for rank in ((growth > self.thresholds.memory) & rises).nonzero().flatten().tolist():
            factor = 1 + float(growth[rank])
            larger = memory[:, rank] > memory[0, rank] * (1 + 0.1 * float(growth[rank]))
            since = self._steps[int(larger.nonzero()[0])]
            findings.append(
                self._chronic("memory", (rank,), "other", factor, since, math.inf, 0.0, "memory")
            )
        return findings

    def _chronic(
        self,
        kind: str,
        ranks: tuple[int, ...],
        section: str,
        factor: float,
        since: int,
        excess: float,
        seconds: float,
        advice: str,
    ) -> Finding:
        """Return a finding that lasts; a large excess is a warning."""
        step, severe = self._steps[-1], excess > self.thresholds.severe
        text = _ADVICE[advice]
        return Finding(kind, ranks, section, factor, since, step, True, severe, seconds, text)

    def _lasting(self, threshold: float, values: torch.Tensor) -> list[tuple[int, int, float]]:
        """Return the columns of ``[W, n]`` that are too large in most steps of the window.

        That is larger than a threshold, and than the noise: of the column itself, or of most
        columns if that is larger.

        Returns:
            The number of each such column, the first step in which it is too large, its median.
        """
        medians = values.median(0).values
        deviations = (values - medians).abs()
        noise = torch.maximum(deviations.median(0).values, deviations.median())
        limits = (self.thresholds.noise * _NORMAL * noise).clamp(min=threshold)
        late = values > limits
        lasts = (medians > limits) & (late.sum(0) >= self.thresholds.chronic)
        return [
            (number, self._steps[int(late[:, number].nonzero()[0])], float(medians[number]))
            for number in lasts.nonzero().flatten().tolist()
        ]


def find_all(timings: Timings) -> list[Finding]:
    """Return what the recorded steps of a run show, in their order."""
    detector = Detector(timings.shape)
    rows = zip(timings.steps, timings.values, strict=True)
    return [finding for step, values in rows for finding in detector.update(step, values)]


def _lower_median(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the median along a dimension, which stays; of two the lower."""
    return values.median(dim, keepdim=True).values


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text, short where there are many.

    Example:
        >>> from fusedops.profiler.detection import listed
        >>> listed((0, 1, 2, 3, 4, 5, 6, 7))
        '0, 1, 2 ... 7'
    """
    if len(ranks) <= 5:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} ... {ranks[-1]}"
