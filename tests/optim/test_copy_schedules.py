"""A fuzzer over the schedules of copies: late, out of order, in pieces, or not at all.

Whatever the schedule, the offloaded optimizer must give the synchronous one's bits.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import masters, parameters, set_gradients, steps, train, values

from fusedops.optim import OffloadedAdamW
from fusedops.runtime.copy_engine import CopyError, HostCopyEngine

SEEDS = range(12)
LONGEST = 0.004  # seconds of a delay: long beside what a bucket of the tiny model takes


class ScheduledEngine(HostCopyEngine):
    """Makes copies at drawn times or not at all, each on a thread of its own."""

    def __init__(self, seed: int, failures: float = 0.0) -> None:
        super().__init__(workers=0)
        self._drawn = random.Random(seed)
        self._failures = failures
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=64)
        self.failed = 0

    def _copy_now(self, copy: Callable[[], None]) -> Future[None]:
        with self._lock:
            delay = self._drawn.choice([0.0, self._drawn.random() * LONGEST])
            fails = self._drawn.random() < self._failures
            self.failed += fails

        def late() -> None:
            time.sleep(delay)
            if fails:
                raise CopyError("drawn to fail")
            copy()

        return self._threads.submit(late)


def scheduled(engine: ScheduledEngine) -> Callable[..., OffloadedAdamW]:
    return functools.partial(OffloadedAdamW, bucket_bytes=100, threads=1, engine=engine)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_changes_a_bit(seed: int) -> None:
    options = {"steps": 3, "max_norm": 0.3, "passes": 1 + seed % 2}
    assert_same_bits(train(scheduled(ScheduledEngine(seed)), **options), train(masters, **options))


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_that_fail_leave_the_optimizer_as_it_was(seed: int) -> None:
    engine = ScheduledEngine(seed, failures=0.05)
    raised = []

    def until_it_succeeds(params: Any, **options: Any) -> OffloadedAdamW:
        optimizer = scheduled(engine)(params, **options)
        step = optimizer.step

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
                    assert_same_bits([dict(state) for state in optimizer.state.values()], before)

        optimizer.step = stubborn  # type: ignore[method-assign]
        return optimizer

    expected = train(masters, steps=4, max_norm=0.3)
    assert_same_bits(train(until_it_succeeds, steps=4, max_norm=0.3), expected)
    # What failed during the backward was tried again by the step.
    assert len(raised) <= engine.failed


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_step_in_place_goes_on_from_the_masters_of_one_whose_copies_failed(seed: int) -> None:
    def until_it_succeeds(action: Callable[[], None]) -> None:
        while True:
            try:
                return action()
            except CopyError as error:
                if "the step was made" in str(error):
                    return

    params, expected = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = scheduled(ScheduledEngine(seed, failures=0.3))(params, overlap=False)
    for step in range(4):
        set_gradients(params, step)
        until_it_succeeds(optimizer.step)
    until_it_succeeds(optimizer.restore)
    steps(masters(expected), 0, 4)
    assert_same_bits(values(params), values(expected))
