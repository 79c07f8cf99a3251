"""Processes that make steps on request, so that settings can be measured interleaved.

While one setting makes its steps the processes of the others are stopped (``SIGSTOP``): the threads
of twenty waiting processes wake often enough to make the steps of another one up to a fifth slower.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from fusedops.runtime import host

_PATIENCE = 600.0
# Share of a setting's seconds in which it warms up: for some ten steps its heap still grows, and a
# virtual machine's host takes longer to hand out a page than the step to fill it.
_WARM_UP = 0.3


@dataclass(frozen=True)
class TeamSetting:
    """A way of making steps."""

    name: str  # for messages
    processes: int  # how many; of several, each is in a gloo process group of all
    threads: int  # of each
    # is called in each process; returns what makes a step and returns its loss; picklable
    make_step: Callable[[], Callable[[], float]]


def interleaved(
    settings: Sequence[TeamSetting], seconds: float, report: Callable[[str], None]
) -> list[tuple[list[float], float]]:
    """Measure steps of settings, one after the other in every round.

    Args:
        settings: all start at once and stay; while one makes its steps, the others are stopped.
        seconds: for each setting, about; it warms up for 0.3 times as long.
        report: is called with what is being done.

    Returns:
        For each setting the seconds of a step in each round, and the loss of the first step.

    Raises:
        RuntimeError: a process failed; with what it said.
    """
    with ExitStack() as stack:
        teams = []
        for setting in settings:
            report(f"starting {setting.name}")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            team = Team(setting, Path(folder) / "store")
            stack.callback(team.close)
            teams.append(team)
        losses, steps = [], []
        for team in teams:
            report(f"warming up {team.name}")
            took, loss = team.run(1)
            losses.append(loss)
            until = time.monotonic() + _WARM_UP * seconds
            while time.monotonic() < until:
                took, _ = team.run(1)
            steps.append(max(1, round(1.0 / max(took, 1e-3))))
        times: list[list[float]] = [[] for _ in teams]
        until = time.monotonic() + seconds * len(teams)
        while time.monotonic() < until or len(times[0]) < 3:
            for team, own, count in zip(teams, times, steps, strict=True):
                own.append(team.run(count)[0])
            report(f"{len(times[0])} rounds")
    return list(zip(times, losses, strict=True))


class Team:
    """The processes of a setting, waiting for the number of steps to make."""

    def __init__(self, setting: TeamSetting, store: Path = Path()) -> None:
        """Start them; ``store`` is the file by which several of them meet."""
        context = multiprocessing.get_context("spawn")
        self.name = setting.name
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(setting.processes):
            mine, theirs = context.Pipe()
            given = setting, rank, str(store), theirs
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)

    def run(self, steps: int) -> tuple[float, float]:
        """Make steps; return the seconds of one, of the slowest process, and the first loss."""
        self._signal("SIGCONT")
        for link in self._links:
            link.send(steps)
        answers = [self._answer(link) for link in self._links]
        self._signal("SIGSTOP")
        return max(answer[0] for answer in answers) / steps, answers[0][1]

    def keep_busy(self) -> None:
        """Make steps until the processes are ended."""
        self.run(1)
        self._signal("SIGCONT")
        for link in self._links:
            link.send(sys.maxsize)

    def _answer(self, link: Connection) -> tuple[float, float]:
        if not link.poll(_PATIENCE):
            raise RuntimeError(f"{self.name}: a process gave no answer in {_PATIENCE:.0f} s")
        try:
            failed, answer = link.recv()
        except EOFError:
            failed, answer = True, "it has ended"
        if failed:
            raise RuntimeError(f"{self.name}: a process failed: {answer}")
        return answer

    def _signal(self, name: str) -> None:
        """Stop or continue the processes, on systems that can."""
        number = getattr(signal, name, None)
        for process in self._processes:
            if number is not None and process.pid is not None:
                os.kill(process.pid, number)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(setting: TeamSetting, rank: int, store: str, link: Connection) -> None:
    """Make as many steps as the other end says, for each of its messages.

    One more comes first, not timed: caches still hold what the setting before left there, and ranks
    have woken at different times.
    """
    try:
        _end_with_parent()
        host.tune_host(threads=setting.threads)
        if setting.processes > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, setting.processes),
                rank=rank,
                world_size=setting.processes,
                timeout=timedelta(seconds=_PATIENCE),
            )
        step = setting.make_step()
        while True:
            steps = link.recv()
            first = step()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            link.send((False, (time.perf_counter() - begin, first)))
    except EOFError:
        return
    except Exception as error:
        link.send((True, f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Have this process killed when its parent ends: a stopped one would stay for ever (Linux)."""
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
