"""Where the time of steps went, rank by rank: from a run's records or from traces.

The columns are those of the step trace tables of cluster profilers: computing, communication that
computing hides or does not, the bubble of a pipeline, input, and what is none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedops.profiler.timings import GROUPS, RunShape, Timings

# Steps at the start that are left out where there are more: caches fill, kernels are tuned.
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """The mean seconds of a step of a rank.

    Attributes:
        rank: of all.
        stage: its pipeline rank.
        step: the whole step.
        computing: forward, backward and optimizer; in a trace the kernels.
        communication: collectives and transfers, whatever else runs at the time.
        not_overlapped: those during which nothing is computed, ``bubble`` included.
        bubble: waiting for another pipeline stage.
        preparing: reading the batch.
        free: what is left.
    """

    rank: int
    stage: int
    step: float
    computing: float
    communication: float
    not_overlapped: float
    bubble: float
    preparing: float
    free: float

    @property
    def own(self) -> float:
        """Seconds in which the rank waits for no other."""
        return self.computing + self.preparing + self.free


@dataclass(frozen=True)
class GroupTimes:
    """Transfers of a process group.

    Attributes:
        kind: of parallelism, a name of ``GROUPS``.
        ranks: of the group.
        bytes: that a rank sends in a step.
        seconds: of the transfers of a step: what the last rank to arrive waits.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: float
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class WhatIf:
    """A step if one thing were as fast as the median of its kind."""

    name: str
    ranks: tuple[int, ...]
    seconds: float  # that a step would take
    saved: float  # of a step


def rank_times(timings: Timings) -> list[RankTimes]:
    """Return the mean step of each rank of a run, without its first steps."""
    values = timings.values[WARM_UP:] if len(timings.steps) > 2 * WARM_UP else timings.values
    used = Timings(timings.shape, timings.steps[-len(values) :], values)
    means = {
        "step": used.of("step"),
        "computing": used.of("forward") + used.of("backward") + used.of("optimizer"),
        "not_overlapped": used.blocked,
        "bubble": used.of("blocked_pp"),
        "preparing": used.of("data"),
        "free": used.of("other") + used.of("validation") + used.of("checkpoint"),
    }
    columns = {name: value.double().mean(0).tolist() for name, value in means.items()}
    # A rank records the communication that it waits for, and no other.
    columns["communication"] = columns["not_overlapped"]
    return [
        RankTimes(
            rank=rank,
            stage=timings.shape.stage_of(rank),
            **{name: value[rank] for name, value in columns.items()},
        )
        for rank in range(timings.shape.ranks)
    ]


def group_times(timings: Timings) -> list[GroupTimes]:
    """Return the transfers of each process group that communicates."""
    result = []
    for kind in GROUPS:
        sent, waits = timings.of(f"bytes_{kind}"), timings.of(f"blocked_{kind}")
        if not bool(sent.any()):
            continue
        for ranks in timings.shape.groups(kind):
            if len(ranks) > 1:
                seconds = waits[:, ranks].min(1).values.double().median()
                size = sent[:, ranks].double().mean()
                result.append(GroupTimes(kind, tuple(ranks), float(size), float(seconds)))
    return result


def what_if(
    shape: RunShape, ranks: Sequence[RankTimes], groups: Sequence[GroupTimes] = ()
) -> list[WhatIf]:
    """Return what a step would take if a rank or a link were as fast as the median.

    The step lasts as long as the rank that computes longest; a rank that becomes faster than the
    next one saves no more than the difference of both. Those that save most come first.
    """
    step = max(times.step for times in ranks)
    own = torch.tensor([times.own for times in ranks], dtype=torch.float64)
    usual, results = _usual(shape, own), []
    for place, times in enumerate(ranks):
        faster = own.clone()
        faster[place] = torch.minimum(own[place], usual[place])
        saved = float(own.max() - faster.max())
        results.append(WhatIf("rank", (times.rank,), step - saved, saved))
    for kind in {group.kind for group in groups}:
        seconds = [group.seconds for group in groups if group.kind == kind]
        typical = float(torch.tensor(seconds).median())
        for group in groups:
            if group.kind == kind and group.seconds > typical:
                saved = group.seconds - typical
                results.append(WhatIf(f"link ({kind})", group.ranks, step - saved, saved))
    results = [item for item in results if item.saved > 0.001 * step]
    return sorted(results, key=lambda item: -item.saved)


def slowest(shape: RunShape, ranks: Sequence[RankTimes]) -> list[tuple[RankTimes, float]]:
    """Return the ranks with their own time by their peers' median, the slowest first."""
    own = torch.tensor([times.own for times in ranks], dtype=torch.float64)
    factors = (own / _usual(shape, own).clamp(min=1e-12)).tolist()
    return sorted(zip(ranks, factors, strict=True), key=lambda pair: -pair[1])


def _usual(shape: RunShape, own: torch.Tensor) -> torch.Tensor:
    """Return for each rank the median of its stage."""
    stages = torch.tensor([shape.stage_of(rank) for rank in range(len(own))])
    usual = own.clone()
    for stage in stages.unique():
        usual[stages == stage] = own[stages == stage].median()
    return usual
