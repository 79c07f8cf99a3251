"""A deterministic scheduler of threads, of which one runs at a time.

A thread runs until it must wait for another one; then the scheduler picks the next that can run.
The order of events is the same in every run of one seed, a deadlock is detected at once instead of
after a timeout, and the state of torch's random numbers, of which a process has one, can be each
thread's own.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch


class StoppedError(BaseException):
    """Another rank has failed: unwinds this one. No ``except Exception`` may catch it."""


class ThreadScheduler:
    """Runs the ranks of one run, one at a time; ``seed`` is that of the order."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._wake = [threading.Event() for _ in range(size)]
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {
            rank: (lambda: True, "has not begun") for rank in range(size)
        }
        self._order = random.Random(seed)
        self._local = threading.local()
        self._over = threading.Event()
        self.failure: str | None = None

    @property
    def rank(self) -> int:
        """The rank of the calling thread.

        Raises:
            RuntimeError: the thread is one that a rank has started.
        """
        if not hasattr(self._local, "rank"):
            raise RuntimeError(
                "ranks that are threads communicate in their own thread alone, not in one that "
                "they start: save a checkpoint with block=True"
            )
        return self._local.rank

    def run(self, bodies: list[Callable[[], Any]], patience: float) -> None:
        """Run a body per rank to its end.

        Args:
            bodies: by rank; what a body raises it must keep itself.
            patience: seconds until a run that does not end is given up.

        Raises:
            TimeoutError: it was given up; the message says where the ranks are.
        """
        state = torch.get_rng_state()
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, body, state), daemon=True)
            for rank, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self._wake_next()
        ended = self._over.wait(patience)
        if not ended:
            self.failure = f"the ranks have not ended in {patience:.0f} s"
            frames = sys._current_frames()
            stacks = [
                f"rank {rank}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-8:])
                for rank, thread in enumerate(threads)
                if thread.ident in frames
            ]
            raise TimeoutError("\n".join([self.failure, *stacks]))
        for thread in threads:
            thread.join()
        torch.set_rng_state(state)

    def wait(self, ready: Callable[[], bool], why: str) -> None:
        """Let others run until ``ready()``; ``why`` stands in the message of a deadlock.

        Raises:
            StoppedError: it will never be: another rank has failed, or all wait.
        """
        if ready():
            return
        self._waits[self.rank] = (ready, why)
        state = torch.get_rng_state()
        self._wake_next()
        self._sleep()
        torch.set_rng_state(state)
        if not ready():
            raise StoppedError(self.failure)

    def fail(self, why: str) -> None:
        """Stop the ranks that wait for others; those that can go on do."""
        self.failure = self.failure or why

    def _run_rank(self, rank: int, body: Callable[[], Any], state: torch.Tensor) -> None:
        self._local.rank = rank
        self._sleep()
        torch.set_rng_state(state)
        try:
            body()
        finally:
            del self._waits[rank]
            self._wake_next()

    def _sleep(self) -> None:
        mine = self._wake[self.rank]
        mine.wait()
        mine.clear()

    def _wake_next(self) -> None:
        """Wake one of the ranks that can run; where none can, one that then raises."""
        if not self._waits:
            self._over.set()
            return
        able = [rank for rank, (ready, _) in self._waits.items() if ready()]
        if not able and self.failure is None:
            ended = [rank for rank in range(len(self._wake)) if rank not in self._waits]
            lines = [f"rank {rank} {why}" for rank, (_, why) in sorted(self._waits.items())]
            lines += [f"rank {rank} has ended" for rank in ended]
            self.fail("every rank waits for another one:\n  " + "\n  ".join(lines))
        self._wake[self._order.choice(sorted(able or self._waits))].set()
