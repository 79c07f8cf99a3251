"""Runs a pipeline's schedule on one rank: computes, sends, receives, in the order of its list.

The lists are those of ``schedules.py``. Torch's own runtime is not used, its split of a backward
is: that runtime keeps a buffer for each micro-batch from step to step, starts by two passes that
only learn shapes, and its second half of a backward bypasses the hooks of data parallelism. Here
memory for a receive lives from its post to its backward; a stage is notified when its last gradient
is ready; and ``computing`` marks each action, so that a recorded log is a timeline.

A stage returns, besides the input of the next one, a scalar: its share of the loss (of the last
stage the loss, of any stage the losses of its routers), whose gradient is 1. It is a second root of
the stage's backward and is not communicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT,
    Action,
    ScheduleTable,
)

# The header that precedes the first tensor of a shape: number of dims, dtype, sizes.
_HEADER = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# Of stage, micro-batch and input: the input of the next stage, ``None`` of the last one, and this
# stage's share of the loss, ``None`` where there is no share.
Computes: TypeAlias = Callable[
    [int, int, "torch.Tensor | None"], tuple["torch.Tensor | None", "torch.Tensor | None"]
]


# By stage and micro-batch.
_Received: TypeAlias = "dict[tuple[int, int], Pending | torch.Tensor]"


class Reduces(Protocol):
    """What sums the gradients of a stage over its replicas: ``data.grad_sync.GradientSync``."""

    def begin(self, *, last: bool) -> None:
        """Prepare for an undivided backward; ``last``: the stage's last one of the step."""

    def recover(self) -> None:
        """Discard what a step that raised has left."""

    def begin_part(self) -> None:
        """Prepare for a part of a backward."""

    def end_part(self, *, weights: bool, last: bool) -> None:
        """Finish a part; ``weights``: it computed the gradients of weights."""

    def start(self) -> None:
        """Start to sum replicated gradients: all gradients of the stage are ready."""

    def finish(self) -> None:
        """Wait for the sums."""


@dataclass
class _InFlight:
    """A micro-batch on a stage, from its forward to the end of its backward."""

    input: torch.Tensor | None
    roots: list[Any]  # tensors, or their edges in the graph
    grads: list[torch.Tensor]
    groups: list[dict[str, Any]] | None = None


@dataclass
class Driver:
    """The stages of a rank and what runs them."""

    table: ScheduleTable
    group: dist.ProcessGroup  # the ranks of the pipeline
    # The modules of this rank, by number of the stage: whose parameters get gradients
    stages: Mapping[int, nn.Module]
    # For each of them, what sums its gradients; nothing for stages without replicas
    data: Mapping[int, Reduces] = field(default_factory=dict)
    # By stage, the most micro-batches that were in flight at a time in the last step
    most_alive: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rank = self.group.rank()
        self._lists = self.table.with_transfers()[self._rank]
        self._forwards = self.table.forwards()[self._rank]
        self._split = {(stage, part) for kind, stage, part in self._lists if kind == INPUT}
        self._known: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}

    def step(self, compute: Computes, device: torch.device, key: Callable[[int], Hashable]) -> None:
        """Run forwards and backwards of all micro-batches, and sum the gradients.

        Args:
            compute: the forward.
            device: of what is received.
            key: of a micro-batch: two with one key send tensors of the same shape and dtype.
        """
        for sync in self.data.values():
            sync.recover()
        self.most_alive.clear()
        _Step(self, compute, device, key).run(self._lists)
        for sync in self.data.values():
            sync.finish()

    @torch.no_grad()
    def forward(
        self, compute: Computes, device: torch.device, key: Callable[[int], Hashable]
    ) -> None:
        """Run the forwards alone; the rest as of ``step``."""
        _Step(self, compute, device, key).run(self._forwards)


@dataclass
class _Step:
    """One pass over the list; its state by stage and micro-batch."""

    driver: Driver
    compute: Computes
    device: torch.device
    key: Callable[[int], Hashable]
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    alive: Counter[int] = field(default_factory=Counter)
    backwards: Counter[int] = field(default_factory=Counter)
    # From other stages: tensors of this rank's own, and pending receives.
    forward: _Received = field(default_factory=dict)
    backward: _Received = field(default_factory=dict)
    outgoing: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    sent: dict[str, Pending] = field(default_factory=dict)

    def run(self, actions: Iterable[Action]) -> None:
        """Run the actions, and wait for the sends that are under way."""
        for action in actions:
            self._run_action(action)
        for pending in self.sent.values():
            pending.wait()
        self.sent.clear()
        assert not (self.in_flight or self.forward or self.backward or self.outgoing)

    def _run_action(self, action: Action) -> None:
        kind, stage, microbatch = action
        place = stage, microbatch
        if kind in (SEND_FORWARD, SEND_BACKWARD):
            self._send(action)
        elif kind == RECEIVE_FORWARD:
            self.forward[place] = self._receive(action, stage - 1)
        elif kind == RECEIVE_BACKWARD:
            self.backward[place] = self._receive(action, stage + 1)
        else:
            received = self._wait(kind, place)
            with collectives.computing(str(action)):
                self._run(kind, place, received)
            if kind in (BACKWARD, WEIGHT):
                self._ended(stage)

    def _wait(self, kind: str, place: tuple[int, int]) -> torch.Tensor | None:
        """Return the tensor of another stage that this action needs."""
        stage = place[0]
        received: Pending | torch.Tensor | None = None
        if kind == FORWARD:
            received = self.forward.pop(place) if stage else None
        elif kind != WEIGHT and stage < self.driver.table.stages - 1:
            received = self.backward.pop(place)
        return received.wait() if isinstance(received, Pending) else received

    def _run(self, kind: str, place: tuple[int, int], received: torch.Tensor | None) -> None:
        if kind == FORWARD:
            self._run_forward(place, received)
            return
        state = self.in_flight[place] if kind == INPUT else self.in_flight.pop(place)
        if received is not None:
            state.grads.insert(0, received)
        if kind == INPUT and state.input is None:  # the first stage has no gradient of an input
            return
        stage = place[0]
        data = self.driver.data.get(stage)
        last = self.backwards[stage] == self.driver.table.microbatches - 1
        if data is not None and kind == BACKWARD:
            data.begin(last=last)
        elif data is not None:
            data.begin_part()
        if kind == INPUT:
            self._run_input(stage, state)
        elif kind == WEIGHT and state.groups is not None:
            self._run_weight(stage, state.groups)
        else:
            torch.autograd.backward(state.roots, state.grads)
        if kind != WEIGHT:
            self._pass_back(place, state)
        if data is not None and kind != BACKWARD:
            data.end_part(weights=kind == WEIGHT, last=last)

    def _run_forward(self, place: tuple[int, int], input: torch.Tensor | None) -> None:
        stage, microbatch = place
        training = torch.is_grad_enabled()
        if input is not None:
            input = input.detach().requires_grad_(training)
        passed, share = self.compute(stage, microbatch, input)
        if passed is not None:
            if training and passed._is_view():  # the split backward cuts its roots off in place
                passed = passed.clone()
            self._put(self.forward, (stage + 1, microbatch), passed.detach(), place)
        if not training:
            return
        roots: list[Any] = [r for r in (passed, share) if r is not None and r.requires_grad]
        grads = [torch.ones_like(share)] if share is not None and share.requires_grad else []
        if place not in self.driver._split:
            # What is sent need not live until its backward, which starts from the edges.
            roots = [get_gradient_edge(root) for root in roots]
        self.in_flight[place] = _InFlight(input, roots, grads)
        self.alive[stage] += 1
        most = self.driver.most_alive
        most[stage] = max(most[stage], self.alive[stage])

    def _run_input(self, stage: int, state: _InFlight) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input

        weights = self.driver.stages[stage].parameters()
        _, state.groups = stage_backward_input(state.roots, state.grads, [state.input], weights)
        state.roots, state.grads = [], []

    def _run_weight(self, stage: int, groups: list[dict[str, Any]]) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self.driver.stages[stage].parameters(), groups)

    def _pass_back(self, place: tuple[int, int], state: _InFlight) -> None:
        stage, microbatch = place
        if state.input is not None:
            assert state.input.grad is not None
            self._put(self.backward, (stage - 1, microbatch), state.input.grad, place)
            state.input = None

    def _put(
        self,
        here: _Received,
        target: tuple[int, int],
        tensor: torch.Tensor,
        place: tuple[int, int],
    ) -> None:
        """Keep a tensor for another stage of this rank, or for the send that follows."""
        if target[0] in self.driver.stages:
            here[target] = tensor
        else:
            self.outgoing[place] = tensor

    def _ended(self, stage: int) -> None:
        """Note the end of a backward; after the last one gradients are summed."""
        self.alive[stage] -= 1
        self.backwards[stage] += 1
        data = self.driver.data.get(stage)
        if data is not None and self.backwards[stage] == self.driver.table.microbatches:
            data.start()

    def _send(self, action: Action) -> None:
        """Send the result of the previous action, after the previous send of this kind ended."""
        kind, stage, microbatch = action
        group = self.driver.group
        tensor = self.outgoing.pop((stage, microbatch)).contiguous()
        forward = kind == SEND_FORWARD
        to = self.driver.table.rank_of(stage + 1 if forward else stage - 1)
        if kind in self.sent:
            self.sent.pop(kind).wait()
        if forward and self._learns(stage + 1, microbatch, tensor):
            header = [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]
            header += [0] * (_HEADER - len(header))
            sent = device_tensor(header, torch.int64, self.device)
            collectives.send_receive(sent, group, to=to, source=None, label="shape").wait()
        self.sent[kind] = collectives.send_receive(
            tensor, group, to=to, source=None, label=str(action)
        )

    def _learns(self, stage: int, microbatch: int, tensor: torch.Tensor) -> bool:
        """Whether a stage needs the header; raise if it expects something else."""
        known, key = self.driver._known, (stage, self.key(microbatch))
        what = tensor.shape, tensor.dtype
        if key in known and known[key] != what:
            raise RuntimeError(
                f"pipeline: stage {stage - 1} made {list(what[0])} {what[1]} of a micro-batch like "
                f"one of which it made {list(known[key][0])} {known[key][1]} before"
            )
        return known.setdefault(key, what) is what

    def _receive(self, action: Action, other: int) -> Pending:
        """Begin to receive what a stage sends."""
        kind, stage, microbatch = action
        source = self.driver.table.rank_of(other)
        # A gradient is as large as what was sent.
        key = (stage if kind == RECEIVE_FORWARD else stage + 1, self.key(microbatch))
        known = self.driver._known
        if key not in known:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            pending = collectives.send_receive(
                header, self.driver.group, to=None, source=source, out=header, label="shape"
            )
            dims, dtype, *sizes = pending.wait().tolist()
            known[key] = torch.Size(sizes[:dims]), _DTYPES[dtype]
        shape, dtype = known[key]
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return collectives.send_receive(
            out, self.driver.group, to=None, source=source, out=out, label=str(action)
        )
