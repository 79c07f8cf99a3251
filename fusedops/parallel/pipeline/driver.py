"""Runs a pipeline's schedule on one rank: computes, sends, receives, in the order of its list.

The lists are those of ``schedules.py``. Torch's own runtime is not used, its split of a backward
is: that runtime keeps a buffer for each micro-batch from step to step, starts by two passes that
only learn shapes, and its second half of a backward bypasses the hooks of data parallelism. Here
``computing`` marks each action, so that a recorded log is a timeline.

A stage returns, besides the input of the next one, a scalar: its share of the loss (of the last
stage the loss, of any stage the losses of its routers), whose gradient is 1. It is a second root of
the stage's backward and is not communicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.comm import collectives
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.data.grad_sync import GradientSync
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
    data: Mapping[int, GradientSync] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.group.rank()
        self._lists, self._forwards = self.table.with_transfers()[rank], self.table.forwards()[rank]
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
    backwards: Counter[int] = field(default_factory=Counter)
    # From other stages, by direction and place: tensors of this rank's own, and pending receives.
    arrived: dict[tuple[str, int, int], Pending | torch.Tensor] = field(default_factory=dict)
    outgoing: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    sent: dict[str, Pending] = field(default_factory=dict)

    def run(self, actions: Iterable[Action]) -> None:
        """Run the actions, and wait for the sends that are under way."""
        for action in actions:
            self._run_action(action)
        for pending in self.sent.values():
            pending.wait()
        self.sent.clear()
        assert not (self.in_flight or self.arrived or self.outgoing)

    def _run_action(self, action: Action) -> None:
        kind, stage, microbatch = action
        if kind in (SEND_FORWARD, SEND_BACKWARD):
            self._send(action)
        elif kind == RECEIVE_FORWARD:
            self.arrived[FORWARD, stage, microbatch] = self._receive(action, stage - 1)
        elif kind == RECEIVE_BACKWARD:
            self.arrived[BACKWARD, stage, microbatch] = self._receive(action, stage + 1)
        else:
            received: Pending | torch.Tensor | None = None
            if kind != WEIGHT:
                direction = FORWARD if kind == FORWARD else BACKWARD
                received = self.arrived.pop((direction, stage, microbatch), None)
            received = received.wait() if isinstance(received, Pending) else received
            run = self._run_forward if kind == FORWARD else self._run_backward
            with collectives.computing(str(action)):
                run(action, received)
            if kind in (BACKWARD, WEIGHT):
                self.backwards[stage] += 1
                data = self.driver.data.get(stage)
                if data is not None and self.backwards[stage] == self.driver.table.microbatches:
                    data.start()

    def _run_forward(self, action: Action, input: torch.Tensor | None) -> None:
        _, stage, microbatch = action
        training = torch.is_grad_enabled()
        if input is not None:
            input = input.detach().requires_grad_(training)
        passed, share = self.compute(stage, microbatch, input)
        if passed is not None:
            if training and passed._is_view():  # the split backward cuts its roots off in place
                passed = passed.clone()
            self._pass(action, FORWARD, stage + 1, passed.detach())
        if not training:
            return
        roots: list[Any] = [r for r in (passed, share) if r is not None and r.requires_grad]
        grads = [torch.ones_like(share)] if share is not None and share.requires_grad else []
        if (stage, microbatch) not in self.driver._split:
            # What is sent need not live until its backward, which starts from the edges.
            roots = [get_gradient_edge(root) for root in roots]
        self.in_flight[stage, microbatch] = _InFlight(input, roots, grads)

    def _run_backward(self, action: Action, received: torch.Tensor | None) -> None:
        from torch.distributed.pipelining import _backward

        kind, stage, microbatch = action
        take = self.in_flight.__getitem__ if kind == INPUT else self.in_flight.pop
        state = take((stage, microbatch))
        if received is not None:
            state.grads.insert(0, received)
        if kind == INPUT and state.input is None:  # the first stage has no gradient of an input
            return
        data, weights = self.driver.data.get(stage), self.driver.stages[stage].parameters()
        is_last = self.backwards[stage] == self.driver.table.microbatches - 1
        if data is not None and kind == BACKWARD:
            data.begin(last=is_last)
        elif data is not None:
            data.begin_part()
        if kind == INPUT:
            _, state.groups = _backward.stage_backward_input(
                state.roots, state.grads, [state.input], weights
            )
            state.roots, state.grads = [], []
        elif kind == WEIGHT and state.groups is not None:
            _backward.stage_backward_weight(weights, state.groups)
        else:
            torch.autograd.backward(state.roots, state.grads)
        if kind != WEIGHT and state.input is not None:
            assert state.input.grad is not None
            self._pass(action, BACKWARD, stage - 1, state.input.grad)
            state.input = None
        if data is not None and kind != BACKWARD:
            data.end_part(weights=kind == WEIGHT, last=is_last)

    def _pass(self, action: Action, direction: str, target: int, tensor: torch.Tensor) -> None:
        """Keep a tensor for another stage of this rank, or for the send that follows."""
        _, stage, microbatch = action
        if target in self.driver.stages:
            self.arrived[direction, target, microbatch] = tensor
        else:
            self.outgoing[stage, microbatch] = tensor

    def _send(self, action: Action) -> None:
        """Send the result of the previous action, after the previous send of this kind ended."""
        kind, stage, microbatch = action
        group, forward = self.driver.group, kind == SEND_FORWARD
        tensor = self.outgoing.pop((stage, microbatch)).contiguous()
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
