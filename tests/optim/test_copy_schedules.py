"""A fuzzer over the schedules of copies and jobs: late, out of order, in pieces, or not at all.

Whatever the schedule, the offloaded optimizer must give the synchronous one's bits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import masters, train

from fusedops.optim import OffloadedAdamW
from fusedops.runtime.copy_engine import CopyError, HostCopyEngine

SEEDS = range(12)
LONGEST = 0.004  # seconds of a delay: long beside what a bucket of the tiny model takes


class Schedule:
    """Carries out copies and submissions at drawn times, each on a thread of its own."""

    def __init__(self, seed: int, failures: float = 0.0) -> None:
        self._drawn = random.Random(seed)
        self._lock = threading.Lock()
        self._failures = failures
        self.failed = 0

    def run(self, action: Callable[[], None], *, may_fail: bool = True) -> _Ticket:
        with self._lock:
            delay = self._drawn.choice([0.0, self._drawn.random() * LONGEST])
            fails = may_fail and self._drawn.random() < self._failures
            self.failed += fails
        return _Ticket(action, delay, fails)


class _Ticket:
    def __init__(self, action: Callable[[], None], delay: float, fails: bool) -> None:
        self._error: CopyError | None = CopyError("drawn to fail") if fails else None
        self._thread = threading.Thread(target=self._work, args=(action, delay))
        self._thread.start()

    def _work(self, action: Callable[[], None], delay: float) -> None:
        time.sleep(delay)
        if self._error is None:
            action()

    def result(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error


class ScheduledEngine(HostCopyEngine):
    """Copies at drawn times."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(workers=0)
        self._copy_now = schedule.run  # type: ignore[method-assign]


class LateQueue:
    """The step queue, to which jobs come late."""

    def __init__(self, queue: Any, schedule: Schedule) -> None:
        self._queue, self._schedule = queue, schedule
        self._numbers: dict[int, tuple[_Ticket, list[int]]] = {}
        self._lock = threading.Lock()

    def submit(self, tensors: list[Any], **options: Any) -> int:
        numbers: list[int] = []

        def pass_on() -> None:
            numbers.append(self._queue.submit(tensors, **options))

        ticket = self._schedule.run(pass_on, may_fail=False)
        with self._lock:
            self._numbers[id(ticket)] = ticket, numbers
        return id(ticket)

    def wait(self, number: int) -> list[float]:
        with self._lock:
            ticket, numbers = self._numbers.pop(number)
        ticket.result()
        return self._queue.wait(numbers[0])

    def close(self) -> None:
        self._queue.close()


def scheduled(schedule: Schedule) -> Callable[..., OffloadedAdamW]:
    def make(params: Any, **options: Any) -> OffloadedAdamW:
        optimizer = OffloadedAdamW(
            params, bucket_bytes=100, threads=1, engine=ScheduledEngine(schedule), **options
        )
        assert optimizer._workers is not None
        optimizer._workers._queue = LateQueue(optimizer._workers._queue, schedule)
        return optimizer

    return make


@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_changes_a_bit(seed: int) -> None:
    options = {"steps": 3, "max_norm": 0.3, "passes": 1 + seed % 2}
    assert_same_bits(train(scheduled(Schedule(seed)), **options), train(masters, **options))


@pytest.mark.ci
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "in place"])
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_that_fail_leave_the_optimizer_as_it_was(seed: int, overlap: bool) -> None:
    schedule = Schedule(seed, failures=0.05)
    make = scheduled(schedule)
    raised = []

    def until_it_succeeds(params: Any, **options: Any) -> OffloadedAdamW:
        optimizer = make(params, overlap=overlap, **options)
        step, restore = optimizer.step, optimizer.restore

        def stubborn(closure: Any = None) -> Any:
            while True:
                before = [
                    {name: value.clone() for name, value in state.items()}
                    for state in optimizer.state.values()
                ]
                try:
                    return step(closure)
                except CopyError as error:
                    raised.append(error)
                    if "the step was made" in str(error):
                        assert not overlap
                        return until_restored()
                    assert_same_bits([dict(state) for state in optimizer.state.values()], before)

        def until_restored() -> None:
            while True:
                try:
                    return restore()
                except CopyError as error:
                    raised.append(error)

        optimizer.step = stubborn  # type: ignore[method-assign]
        return optimizer

    expected = train(masters, steps=4, max_norm=0.3)
    assert_same_bits(train(until_it_succeeds, steps=4, max_norm=0.3), expected)
    # What failed during the backward was tried again by the step.
    assert len(raised) <= schedule.failed


def test_a_failed_copy_is_told() -> None:
    optimizer = scheduled(Schedule(0, failures=1.0))([torch.nn.Parameter(torch.ones(3))])
    (param,) = optimizer.param_groups[0]["params"]
    param.sum().backward()
    with pytest.raises(CopyError, match="drawn to fail"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 0.0
    assert_same_bits(param.detach(), torch.ones(3))


def test_parameters_are_written_anew_from_their_masters() -> None:
    optimizer = scheduled(Schedule(0))([torch.nn.Parameter(torch.randn(50).bfloat16())])
    (param,) = optimizer.param_groups[0]["params"]
    before = param.detach().clone()
    with torch.no_grad():
        param.fill_(float("nan"))
    optimizer.restore()
    assert_same_bits(param.detach(), before)
