"""Finds what makes a job slow while it runs: rank, stage, link, data, experts, pauses.

A rank is judged by its own time, in which it waits for nobody: the one that arrives late is named,
never those that wait for it. It is compared with its peers, the ranks of the same pipeline stage,
which have the same work; a stage is compared with what it took before. A link is judged by what the
last rank to arrive at a collective waits, which is the transfer alone.

A deviation counts when it is larger than a threshold and than the noise of this job: the median
absolute deviation of the same quantity over the last steps and all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedops.profiler.timings import GROUPS, REGULAR, RunShape, column

# Deviations in units of a normal distribution's standard deviation: median absolute deviations
# times this number.
_NORMAL = 1.4826
_PEER_SECTIONS = [column(name) for name in REGULAR]
# A rank or a stage is slow from this share of its peers' time on, and a link from this share of a
# step on.
_SLOW = 0.06
# From this share on a finding is a warning, and below it a note; the cluster analysis of MindSpore
# reports from it on.
_SEVERE = 0.2
_PAUSE, _PAUSE_SECONDS = 0.3, 0.05  # at least this share of a step, and these seconds
_IMBALANCE = 2.0  # rows of the experts with most, by their mean
_NOISE = 3.5  # standard deviations of the job's own noise
# Steps of which the median is taken, and those of them that have a deviation which lasts.
_WINDOW, _LASTS = 8, 5
_WARM_UP = 3  # steps that count for nothing: caches fill, kernels are tuned


@dataclass(frozen=True)
class Finding:
    """What makes a job slow.

    Attributes:
        kind: ``"rank"``, ``"stage"``, ``"link"``, ``"data"``, ``"experts"`` or ``"pause"``.
        ranks: those that cause it: one, those of a stage, or those of a process group.
        section: of the step, a name of ``REGULAR``; of a link the kind of parallelism.
        factor: how many times what is usual.
        since: the first step that shows it.
        step: at which it was found.
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
    severe: bool
    seconds: float
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence()}; {self.advice}"

    def sentence(self) -> str:
        """Return what was found, in a line."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {listed(self.ranks)}"
        since = f"since step {self.since}" if self.kind != "pause" else f"at step {self.since}"
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
}


class Detector:
    """Looks at the rows of all ranks of a run, step by step, and tells what is new.

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

    def __init__(self, shape: RunShape) -> None:
        self.shape = shape
        self._steps: deque[int] = deque(maxlen=_WINDOW)
        self._rows: deque[torch.Tensor] = deque(maxlen=_WINDOW)
        self._seen = 0
        self._reported: dict[tuple[Any, ...], int] = {}
        self._usual: torch.Tensor | None = None  # rows of the first window: what was usual
        # Pauses of the last step, which may turn out to last, and all ranks that were late then.
        self._standing: list[Finding] = []
        self._late: set[int] = set()
        stages = torch.tensor([shape.stage_of(rank) for rank in range(shape.ranks)])
        self._stages = [(stages == stage).nonzero().flatten() for stage in range(shape.sizes["pp"])]

    def update(self, step: int, rows: torch.Tensor) -> list[Finding]:
        """Return what a step shows for the first time.

        Args:
            step: its number.
            rows: float32 ``[ranks, fields]``.
        """
        self._seen += 1
        if self._seen <= _WARM_UP:
            return []
        self._steps.append(step)
        self._rows.append(rows)
        findings = self._pauses(rows)
        if len(self._rows) >= _LASTS:
            window, usual = torch.stack(list(self._rows)), self._usual
            findings += self._slow_ranks(window)
            if usual is not None:
                findings += self._slow_stages(window, usual)
                findings += self._slow_links(window, usual)
            elif len(window) == _WINDOW:
                self._usual = window.median(dim=0).values
        return self._new(findings)

    def _new(self, findings: list[Finding]) -> list[Finding]:
        """Return those that were not reported in the last window."""
        new = []
        for finding in findings:
            key = (finding.kind, finding.ranks, finding.section)
            before = self._reported.get(key)
            self._reported[key] = finding.step
            if before is None or finding.step - before > _WINDOW:
                new.append(finding)
        return new

    def _slow_ranks(self, window: torch.Tensor) -> Iterator[Finding]:
        own = window[:, :, _PEER_SECTIONS].sum(2)  # [W, R]
        for ranks in self._stages:
            if len(ranks) < 2:
                continue
            of_peers = own[:, ranks]
            excess = of_peers / _lower_median(of_peers, 1) - 1
            for place, since, median in self._lasting(_SLOW, excess):
                yield self._slow_rank(window, ranks, int(ranks[place]), since, median)

    def _slow_rank(
        self, window: torch.Tensor, ranks: torch.Tensor, rank: int, since: int, excess: float
    ) -> Finding:
        sections = window[:, :, _PEER_SECTIONS]
        of_peers = _lower_median(sections[:, ranks], 1).squeeze(1)
        more = (sections[:, rank] - of_peers).median(0).values
        section = REGULAR[int(more.argmax())]
        kind, factor = "rank", 1 + excess
        advice = {"data": "input", "optimizer": "optimizer"}.get(section, "rank")
        work = {
            "data": window[:, :, column("pairs")] + window[:, :, column("tokens")],
            "experts": window[:, :, column("expert_rows")],
        }
        for name, amount in work.items():
            share = amount[:, rank] / _lower_median(amount[:, ranks], 1).squeeze(1).clamp(min=1)
            most = _IMBALANCE if name == "experts" else 1 + _SLOW
            if section in ("forward", "backward") and float(share.median()) > most:
                kind, factor, advice = name, float(share.median()), name
        seconds = float(more.sum())
        return self._chronic(kind, (rank,), section, factor, since, excess, seconds, advice)

    def _slow_stages(self, window: torch.Tensor, usual: torch.Tensor) -> Iterator[Finding]:
        """Yield stages all of whose ranks are slower than before, other stages are not."""
        if len(self._stages) < 2:
            return
        own = window[:, :, _PEER_SECTIONS]
        before = usual[:, _PEER_SECTIONS]
        times = torch.cat([_lower_median(own[:, ranks].sum(2), 1) for ranks in self._stages], 1)
        usually = torch.stack([before[ranks].sum(1).median() for ranks in self._stages])
        growth = times / usually  # [W, stages]
        excess = growth / _lower_median(growth, 1) - 1
        for stage, since, median in self._lasting(_SLOW, excess):
            ranks = self._stages[stage]
            more = own[:, ranks].median(1).values.median(0).values - before[ranks].median(0).values
            kind, section = "stage" if len(ranks) > 1 else "rank", REGULAR[int(more.argmax())]
            of_stage, seconds = tuple(ranks.tolist()), float(more.sum())
            yield self._chronic(kind, of_stage, section, 1 + median, since, median, seconds, kind)

    def _slow_links(self, window: torch.Tensor, usual: torch.Tensor) -> Iterator[Finding]:
        """Yield groups whose transfers take longer than before, or than those of other groups."""
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
            usually = usual[:, column(f"blocked_{name}")]
            before = torch.stack([usually[group].min() for group in groups])
            if len(groups) > 2:  # a link that was slow from the start is slower than others
                before = torch.minimum(before, transfer.median(0).values.median())
            more = (transfer - before) / seconds[:, None]
            for number, since, median in self._lasting(_SLOW, more):
                ranks, took = tuple(groups[number]), transfer[:, number]
                extra = float((took - before[number]).median())
                factor = float(took.median() / before[number].clamp(min=1e-6))
                yield self._chronic("link", ranks, name, factor, since, median, extra, "link")

    def _pauses(self, rows: torch.Tensor) -> list[Finding]:
        """Return ranks that stood still in the step before, and do not any more.

        By Python's collector, or by what nobody sees.
        """
        if len(self._rows) <= _LASTS:
            return []
        step = self._steps[-1]
        window = torch.stack(list(self._rows)[:-1])
        seconds = float(window[:, :, column("step")].median())
        more = rows[:, _PEER_SECTIONS] - window[:, :, _PEER_SECTIONS].median(0).values
        least = max(_PAUSE * seconds, _PAUSE_SECONDS)
        late = more.sum(1) > least
        ended = [finding for finding in self._standing if not late[finding.ranks[0]]]
        self._standing = []
        before, self._late = self._late, set(late.nonzero().flatten().tolist())
        for rank in self._late - before:
            lost = float(more[rank].sum())
            collected = float(rows[rank, column("gc")]) > lost / 2
            section = "gc" if collected else REGULAR[int(more[rank].argmax())]
            advice, share = _ADVICE["gc" if collected else "pause"], lost / seconds
            self._standing.append(
                Finding("pause", (rank,), section, 1 + share, step, step + 1, True, lost, advice)
            )
        return ended

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
        severe, text = excess > _SEVERE, _ADVICE[advice]
        return Finding(kind, ranks, section, factor, since, self._steps[-1], severe, seconds, text)

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
        limits = (_NOISE * _NORMAL * noise).clamp(min=threshold)
        late = values > limits
        lasts = (medians > limits) & (late.sum(0) >= _LASTS)
        return [
            (number, self._steps[int(late[:, number].nonzero()[0])], float(medians[number]))
            for number in lasts.nonzero().flatten().tolist()
        ]


def _lower_median(values: torch.Tensor, dim: int) -> torch.Tensor:
    return values.median(dim, keepdim=True).values  # of two the lower


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text, short where there are many: ``0, 1, 2 ... 7``."""
    if len(ranks) <= 5:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))} ... {ranks[-1]}"
