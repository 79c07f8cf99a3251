"""Steps of buckets that overlap the backward and write to a second copy of the state.

A bucket is some parameters of one group. When the last of their gradients has been accumulated, a
worker copies the gradients to its own staging memory, has the step queue sum their squares and
make the step, from the current state into a second one (the shadow), and keeps the sums. The
current state is not touched: ``commit`` exchanges the two, and without it no step is made.

The optimizer's step decides whether a finished job is used: only if every gradient is still the
one that was copied, and if the job used the numbers of the step (``Basis``).
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusedops.ops.adamw import Draw
from fusedops.optim import _shards, _step_queue
from fusedops.optim._state import MOMENTS, read_parameter
from fusedops.optim._step_queue import Basis
from fusedops.runtime.copy_engine import CopyEngine, finish_all

_ALIGNMENT = 64  # bytes: what is written around the cache must begin there
STATES = ("master", *MOMENTS)


@dataclass(eq=False)
class Slot:
    """A parameter of a bucket, its state and its buffers in host memory."""

    param: Any
    index: int  # of the parameter in its group
    state: dict[str, Any]  # its state in the optimizer
    # the state after the step that is being made; empty where steps are made in place
    shadow: dict[str, Any]
    copy: torch.Tensor  # the parameter after that step, in its own dtype, local
    draw: Draw | None  # what its stochastic rounding draws by
    # The trace of the parameter (_shards.trace) when the optimizer last wrote or read it
    seen: tuple[Any, ...] | None = None
    gradient: torch.Tensor | None = None  # without overlap the last one that was copied to the host

    @property
    def target(self) -> dict[str, Any]:
        return self.shadow or self.state

    def read_changed(self) -> bool:
        """Let the master follow a parameter that was written to; return whether it had to."""
        now = _shards.trace(self.param)
        if now == self.seen:
            return False
        self.seen = now
        return read_parameter(self.param, self.state["master"])

    def commit(self) -> None:
        """Replace the current state by that after the step."""
        for name, new in self.shadow.items():
            self.shadow[name], self.state[name] = self.state[name], new
        self.state["step"] += 1


@dataclass(frozen=True)
class GradientSnapshot:
    """A gradient as it was when a job began."""

    grad: Any  # the parameter's ``grad``
    local: torch.Tensor  # the local shard, sharded as the parameter is
    version: int  # counts what was written to ``grad``
    mark: Any  # of the copy engine: the device work that precedes the copy

    @classmethod
    def of(cls, param: Any, mark: Any) -> GradientSnapshot:
        """Return a snapshot of a parameter's gradient; may run a collective."""
        local = _shards.local(_shards.placed_like(param.grad, param))
        return cls(param.grad, local, _shards.version(param.grad), mark)

    def is_that_of(self, param: Any) -> bool:
        """Whether this is still a parameter's gradient, unchanged."""
        return param.grad is self.grad and _shards.version(param.grad) == self.version


@dataclass
class Job:
    """One run of a bucket: its inputs and results."""

    gradients: dict[Slot, GradientSnapshot]  # of the slots that have one, in the bucket's order
    basis: Basis
    steps: bool  # or only the sums
    sums: list[float] = field(default_factory=list)
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)


class Bucket:
    """Some parameters of one group, the gradients that arrived, and the job that ran last."""

    def __init__(self, group: dict[str, Any], slots: list[Slot]) -> None:
        self.group = group
        self.slots = slots
        self.arrived: dict[Slot, GradientSnapshot] = {}
        self.job: Job | None = None

    def has_sums(self, slots: list[Slot]) -> bool:
        """Return whether the last job's sums are those of the current gradients of the slots."""
        job = self.job
        if job is None or job.error is not None or list(job.gradients) != slots:
            return False
        return all(gradient.is_that_of(slot.param) for slot, gradient in job.gradients.items())

    def forget(self) -> None:
        """Drop the gradients that arrived, and the last job."""
        self.arrived, self.job = {}, None

    def take_error(self) -> Exception | None:
        """Return the error of the last job, and drop that job."""
        error = None if self.job is None else self.job.error
        if error is not None:
            self.forget()
        return error

    @property
    def staging_bytes(self) -> int:
        """The most bytes that copies of its gradients take: those of float32."""
        return sum(_padded(4 * _wide(slot)) for slot in self.slots)


def _wide(slot: Slot) -> int:
    return slot.copy.numel() * max(1, slot.copy.element_size() // 4)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Workers:
    """Threads that carry jobs through: copy in, sum and step, each with its own staging memory.

    A worker begins a bucket only when the last one has been read to its end, so that staging
    memory is never overwritten while the step queue reads it.

    Steps in place can be made once only, so that nothing may fail on the way: a job that sums
    leaves the gradients in host memory, where the new parameters will be, and the one that steps
    finds them there.
    """

    def __init__(self, engine: CopyEngine, *, workers: int, threads: int, staging: int) -> None:
        self._engine = engine
        self._in_place = staging == 0
        self._queue = _step_queue.new_queue(threads)
        self._given: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []
        buffers = [self._staging(staging) for _ in range(workers)]
        try:
            for buffer in buffers:
                thread = threading.Thread(target=self._work, args=(buffer,), daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system has no more threads
            self.close()
            raise

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the threads."""
        return os.getpid() != self._owner

    def start(self, bucket: Bucket, job: Job) -> None:
        """Begin a job; ``job.finished`` is set at its end, in any case."""
        bucket.job = job
        self._given.put(job)

    def close(self) -> None:
        """Finish the jobs that were begun, and end the threads.

        The garbage collector may call it on one of these threads, which then ends by itself.
        """
        if self.is_forked:
            return
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._queue.close()

    def _staging(self, size: int) -> torch.Tensor:
        like = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device="meta")
        memory = host_like(self._engine, like, torch.uint8)
        return memory[-memory.data_ptr() % _ALIGNMENT :][:size]

    def _work(self, staging: torch.Tensor) -> None:
        while (job := self._given.get()) is not None:
            try:
                self._run(job, staging)
            except Exception as error:
                job.error = error
            finally:
                job.finished.set()

    def _run(self, job: Job, staging: torch.Tensor) -> None:
        gradients, basis = job.gradients, job.basis
        if self._in_place and job.steps:  # the job that summed has copied them
            copied = [slot.gradient for slot in gradients if slot.gradient is not None]
        else:
            copied = self._fetch(gradients, staging)
        tensors = [
            _step_queue.describe(
                _locals(slot.state), _locals(slot.target), grad, slot.copy, basis, i, slot.draw
            )
            for i, (slot, grad) in enumerate(zip(gradients, copied, strict=True))
        ]
        number = self._queue.submit(
            tensors,
            beta1=basis.betas[0],
            beta2=basis.betas[1],
            eps=basis.eps,
            grad_factor=basis.grad_factor,
            steps=job.steps,
            stochastic=any(slot.draw is not None for slot in gradients),
        )
        job.sums = self._queue.wait(number)

    def _fetch(
        self, gradients: dict[Slot, GradientSnapshot], staging: torch.Tensor
    ) -> list[torch.Tensor]:
        """Copy gradients to the staging memory, or without it to where they stay."""
        begin, targets, copies = 0, [], []
        for slot, gradient in gradients.items():
            grad = gradient.local
            if self._in_place:
                same = grad.dtype == slot.copy.dtype
                target = slot.copy if same else host_like(self._engine, slot.copy, grad.dtype)
                slot.gradient = target
            else:
                size = grad.numel() * grad.element_size()
                target = staging[begin : begin + size].view(grad.dtype)
                target = torch.as_strided(target, slot.copy.shape, slot.copy.stride())
                begin += _padded(size)
            targets.append(target)
            after = (gradient.mark,)
            copies.append(partial(self._engine.copy, grad, target, to_host=True, after=after))
        finish_all(self._engine, copies)
        return targets


def host_like(engine: CopyEngine, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory of a tensor's shape and strides that an engine copies to and from."""
    return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=engine.pins_memory)


def _locals(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: _shards.local(state[name]) for name in STATES if name in state}
