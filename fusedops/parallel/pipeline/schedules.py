"""Schedules of a pipeline, by name, as lists of actions: what each rank does, in its order.

A schedule divides a step of ``microbatches`` among ``ranks`` that hold ``virtual`` stages each. The
tables are those of ``torch.distributed.pipelining`` but for GPipe and 1F1B, which torch has as code
that runs, not as tables. Nothing here communicates or needs a process group.

Actions on a stage and a micro-batch: ``F`` its forward, ``B`` its backward; or the backward in
two parts, ``I`` for the gradient of its input and ``W``, any time later, for those of its weights.
``ScheduleTable.with_transfers`` inserts sends and receives. A receive is placed where its send is
in one order of the actions of all ranks, so that ranks that follow their lists never wait in a
cycle, even if a send ends only when it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import NamedTuple

from torch import nn

from fusedops._core import checks
from fusedops.parallel.sizes import refuse

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_FORWARD, RECEIVE_FORWARD = "send F", "receive F"
SEND_BACKWARD, RECEIVE_BACKWARD = "send B", "receive B"


class Action(NamedTuple):
    """An action of a rank; prints as ``2F0``: stage, kind, micro-batch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """An order of a pipeline's work."""

    name: str  # as ``ParallelConfig.pipeline_schedule`` has it
    title: str
    _: KW_ONLY
    virtual: int = 1  # stages of a rank, unless more are asked for
    fixed: bool = False  # whether a rank cannot have another number of stages
    splits: bool = False  # whether backwards come in two parts
    is_v: bool = False  # whether stages go down the ranks and up again, else round and round
    # Torch's class (``Schedule...``), ``None`` where the table is made here.
    torch: str | None = None


_v_schedule = partial(PipelineSchedule, virtual=2, fixed=True, splits=True, is_v=True)
SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", "GPipe", fixed=True),
        PipelineSchedule("1f1b", "1F1B", fixed=True),
        PipelineSchedule("interleaved", "interleaved 1F1B", virtual=2, torch="Interleaved1F1B"),
        PipelineSchedule("looped_bfs", "looped, breadth first", virtual=2, torch="LoopedBFS"),
        PipelineSchedule("zero_bubble", "zero bubble", splits=True, torch="InterleavedZeroBubble"),
        _v_schedule("zbv", "zero bubble V", torch="ZBVZeroBubble"),
        _v_schedule("dualpipev", "DualPipeV", torch="DualPipeV"),
    )
}


@dataclass(frozen=True)
class ScheduleTable:
    """The actions of a schedule for given sizes."""

    schedule: PipelineSchedule
    ranks: int  # of the pipeline
    microbatches: int  # of a step
    virtual: int  # stages of a rank
    actions: tuple[tuple[Action, ...], ...]  # of each rank, computations only

    @property
    def stages(self) -> int:
        """All stages of the pipeline."""
        return self.ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        """Return which rank holds a stage."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule.is_v and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def boundaries(self, rank: int) -> int:
        """Return how many neighbours of the stages of a rank are on other ranks."""
        neighbours = [stage + step for stage in self.stages_of(rank) for step in (-1, 1)]
        inside = [stage for stage in neighbours if 0 <= stage < self.stages]
        return sum(self.rank_of(stage) != rank for stage in inside)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions of which at least one must be done before, if any."""
        kind, stage, microbatch = action
        if kind == FORWARD:
            return [Action(FORWARD, stage - 1, microbatch)] if stage else []
        if kind == WEIGHT:
            return [Action(INPUT, stage, microbatch)]
        if stage == self.stages - 1:
            return [Action(FORWARD, stage, microbatch)]
        return [Action(backward, stage + 1, microbatch) for backward in (BACKWARD, INPUT)]

    @cached_property
    def in_order(self) -> tuple[tuple[int, Action], ...]:
        """Ranks and actions of all ranks, in an order in which they can run one by one."""
        left = [deque(actions) for actions in self.actions]
        done: dict[Action, int] = {}
        while any(left):
            before = len(done)
            for rank, waiting in enumerate(left):
                needs = self.needs(waiting[0]) if waiting else []
                if waiting and (not needs or any(need in done for need in needs)):
                    done[waiting.popleft()] = rank
            assert len(done) > before, f"{self.schedule.name} waits in a circle"
        return tuple((rank, action) for action, rank in done.items())

    def with_transfers(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank with sends and receives."""
        return self._with_transfers(self.in_order)

    def forwards(self) -> tuple[tuple[Action, ...], ...]:
        """Return the forwards alone, with transfers: for validation."""
        places = product(range(self.microbatches), range(self.stages))
        return self._with_transfers(
            (self.rank_of(stage), Action(FORWARD, stage, i)) for i, stage in places
        )

    def _with_transfers(
        self, in_order: Iterable[tuple[int, Action]]
    ) -> tuple[tuple[Action, ...], ...]:
        """Return the actions, each send after what is sent, each receive at the same moment."""
        ordered: list[list[Action]] = [[] for _ in range(self.ranks)]
        for rank, action in in_order:
            ordered[rank].append(action)
            kind, stage, microbatch = action
            send, receive, other = SEND_BACKWARD, RECEIVE_BACKWARD, stage - 1
            if kind == FORWARD:
                send, receive, other = SEND_FORWARD, RECEIVE_FORWARD, stage + 1
            if kind == WEIGHT or not 0 <= other < self.stages or self.rank_of(other) == rank:
                continue
            ordered[rank].append(Action(send, stage, microbatch))
            ordered[self.rank_of(other)].append(Action(receive, other, microbatch))
        return tuple(map(tuple, ordered))


def table(name: str, ranks: int, microbatches: int, virtual: int | None = None) -> ScheduleTable:
    """Return what each rank does in a step.

    Args:
        name: of ``SCHEDULES``.
        ranks: of the pipeline.
        microbatches: of a step.
        virtual: stages of a rank; the schedule's own number by default.

    Raises:
        ValueError: there is no such schedule, or it does not exist for these sizes; the message has
            those that would fit.
        TypeError: a size is no integer.

    Example:
        >>> from fusedops.parallel.pipeline.schedules import table
        >>> print(*table("1f1b", ranks=2, microbatches=3).actions[0])
        0F0 0F1 0B0 0F2 0B1 0B2
    """
    schedule = check_schedule("pipeline", name, ranks, microbatches, virtual)
    virtual = schedule.virtual if virtual is None else virtual
    if schedule.torch is None:
        ahead = [microbatches if name == "gpipe" else ranks - rank for rank in range(ranks)]
        actions = [_in_turns(rank, ahead[rank], microbatches) for rank in range(ranks)]
    else:
        actions = _of_torch(schedule.torch, ranks, microbatches, virtual)
    return ScheduleTable(schedule, ranks, microbatches, virtual, tuple(map(tuple, actions)))


def check_schedule(
    op: str, name: str, ranks: int, microbatches: int, virtual: int | None = None
) -> PipelineSchedule:
    """Return a schedule; raise unless it exists for these sizes."""
    checks.choice(op, "pipeline_schedule", name, tuple(SCHEDULES))
    schedule = SCHEDULES[name]
    for what, size in (("pp", ranks), ("microbatches", microbatches)):
        checks.integer(op, what, size, least=1)
    if virtual is not None:
        checks.integer(op, "pipeline_virtual", virtual, least=1)
        if schedule.fixed and virtual != schedule.virtual:
            expected = f"{schedule.virtual} with pipeline_schedule {name!r}"
            others = [other.name for other in SCHEDULES.values() if not other.fixed]
            hint = f" ({', '.join(others)} take any number)"
            checks.fail(op, "pipeline_virtual", expected, f"{virtual}{hint}")
    if name == "dualpipev" and microbatches < 2 * ranks:
        expected = f"at least {2 * ranks}, the stages of {name!r} on pp = {ranks} ranks"
        hint = "; '1f1b' takes any number"
        checks.fail(op, "microbatches", expected, f"{microbatches}{hint}")
    # Numbers of micro-batches that are complete rounds of at least ``ranks`` each.
    near = [n for n in range(1, 2 * microbatches + ranks) if n % max(1, n // ranks) == 0]
    if name in ("interleaved", "zero_bubble") and microbatches not in near:
        expected = f"a multiple of pp = {ranks}, or of its rounds, with {name!r}"
        refuse(op, "microbatches", expected, microbatches, near)
    return schedule


def _in_turns(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """Return backwards and forwards in turns; the forwards are up to ``ahead`` micro-batches ahead.

    GPipe runs all of them ahead.
    """
    actions = [Action(FORWARD, stage, i) for i in range(min(ahead, microbatches))]
    for i in range(microbatches):
        actions.append(Action(BACKWARD, stage, i))
        if ahead + i < microbatches:
            actions.append(Action(FORWARD, stage, ahead + i))
    return actions


class _StageStub:
    """What torch's schedules read of a stage when they make their tables."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage, stages, ranks
        self.group_rank = 0
        self.submod = nn.Module()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


@cache
def _of_torch(name: str, ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
    """Return the computations of one of torch's schedules."""
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, f"Schedule{name}")
    stubs = [_StageStub(lap * ranks, ranks * virtual, ranks) for lap in range(virtual)]
    # The sends and receives that it would insert are not used, and take longer than all the rest.
    plain = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda *_: None})
    order = plain(stubs, microbatches).pipeline_order
    return [
        [
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)  # torch pairs some
        ]
        for rank in range(ranks)
    ]
