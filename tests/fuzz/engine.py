"""Runs calls in forked children, so that a call that kills its process is known and the rest go on.

A call is made from the seed and its number alone. A child writes the number of the call in flight
into shared memory before it runs it; where the child dies or hangs, the parent knows which call it
was, and goes on behind it. What a child counts stands in shared memory too: a death loses nothing.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

OUTCOMES = ("returned", "refused", "skipped")  # of a call that is no finding
# No call needs more: an allocation beyond it is refused as on a full machine. The sanitizers' own
# shadow memory is larger, and they have a limit of their own (tools/sanitized.py).
MOST_MEMORY = 12 << 30
KEPT_LINES = 60
# A call hangs when it has taken its patience of the processor's time, or so many times it of time.
WAITS = 10


class WrongResultError(Exception):
    """What a call gave is wrong; the message says how."""


class Fuzzer(Protocol):
    """Makes calls of one kind."""

    name: str
    batch: int  # calls of a child

    def run(self, rng: random.Random) -> str:
        """Make a call and run it; return one of ``OUTCOMES``, or raise ``WrongResultError``."""

    def describe(self, rng: random.Random) -> str:
        """Return the op of the call that ``run`` makes of ``rng``, and its arguments."""


@dataclass
class Finding:
    """A call that must not end as it did."""

    index: int
    outcome: str
    call: str
    again: str  # the command that makes it again
    log: str

    def __str__(self) -> str:
        return f"call {self.index} {self.outcome}: {self.call}\n{self.again}\n{self.log}"


@dataclass
class Report:
    """What a run found."""

    fuzzer: str
    seed: int
    seconds: float = 0.0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """How many calls were run."""
        return sum(self.counts.values()) + len(self.findings)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        return (
            f"{self.fuzzer}: seed {self.seed}, {self.calls} calls in {self.seconds:.0f} s: "
            f"{counts or 'nothing'}; {len(self.findings)} findings"
        )


def rng_of(seed: int, index: int) -> random.Random:
    """Return the random numbers of one call."""
    return random.Random(seed << 40 | index)


class _Child:
    """A forked process that runs the calls ``[first, last)``, as its parent sees it."""

    def __init__(self, fuzzer: Fuzzer, seed: int, first: int, last: int, log: Path) -> None:
        self.first, self.last, self.log = first, last, log
        self.shared = mmap.mmap(-1, 8 * (1 + len(OUTCOMES)))
        self._set(0, first)
        self.seen, self.since, self.spent = first, time.monotonic(), 0.0
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._run(fuzzer, seed)
                code = 0
            except WrongResultError as wrong:
                print(f"wrong result: {wrong}", file=sys.stderr)
                code = 3
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self.shared, 8 * place, value)

    def _numbers(self) -> tuple[int, ...]:
        """Return the number of the call in flight, and how many calls ended in each way."""
        return struct.unpack_from(f"{1 + len(OUTCOMES)}q", self.shared)

    def _run(self, fuzzer: Fuzzer, seed: int) -> None:
        for descriptor in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stderr = os.fdopen(2, "w", buffering=1)  # pytest has another
        faulthandler.enable()
        if "ASAN_OPTIONS" not in os.environ:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for index in range(self.first, self.last):
            self._set(0, index)
            place = 1 + OUTCOMES.index(fuzzer.run(rng_of(seed, index)))
            self._set(place, self._numbers()[place] + 1)

    def poll(self, patience: float) -> str | None:
        """Return how the process ended (``""``: well), or ``None`` while it runs; end a hang."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            index, now, spent = self._numbers()[0], time.monotonic(), _processor_seconds(self.pid)
            if index != self.seen:
                self.seen, self.since, self.spent = index, now, spent
            # A machine that is busy with other things is no hang, but a call that waits is.
            if spent - self.spent < patience and now - self.since < WAITS * patience:
                return None
            self.kill()
            return f"hangs for {patience:.0f} s"
        if os.WIFSIGNALED(status):
            return f"dies of {signal.Signals(os.WTERMSIG(status)).name}"
        code = os.WEXITSTATUS(status)
        return {0: "", 3: "wrong result"}.get(code, f"exits with {code}")

    def kill(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> tuple[int, collections.Counter[str], str]:
        """Return the last call, how the others ended and the last lines that were written."""
        index, *counts = self._numbers()
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        self.shared.close()
        ended = {name: count for name, count in zip(OUTCOMES, counts, strict=True) if count}
        return index, collections.Counter(ended), "\n".join(lines[:KEPT_LINES])


def _processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(
    fuzzer: Fuzzer,
    *,
    seed: int,
    calls: int,
    folder: Path,
    processes: int = 1,
    first: int = 0,
    seconds: float = float("inf"),
    patience: float = 20.0,
    most_findings: int = 1000,
) -> Report:
    """Run calls ``[first, first + calls)`` of a seed and return what they did.

    Children, of which so many ``processes`` run at a time, write to ``folder``. No batch begins
    after so many seconds or findings. A call that takes ``patience`` seconds of the processor
    hangs.
    """
    torch.set_num_threads(1)  # a forked child has only the thread that forked
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(fuzzer.name, seed)
    gc.collect()
    gc.freeze()
    began, end = time.monotonic(), first + calls
    rests: list[tuple[int, int]] = []  # of batches whose child has died
    running: list[_Child] = []
    try:
        while True:
            report.seconds = time.monotonic() - began
            late = report.seconds > seconds or len(report.findings) >= most_findings
            while len(running) < processes and not late and (rests or first < end):
                if not rests:
                    rests.append((first, min(end, first + fuzzer.batch)))
                    first = rests[-1][1]
                log = folder / f"{fuzzer.name}-{os.getpid()}-{rests[-1][0]}.log"
                running.append(_Child(fuzzer, seed, *rests.pop(), log))
            if not running:
                return report
            time.sleep(0.005)
            for child in list(running):
                ended = child.poll(patience)
                if ended is None:
                    continue
                running.remove(child)
                index, counts, log = child.close()
                report.counts += counts
                if not ended:
                    continue
                call = fuzzer.describe(rng_of(seed, index))
                again = (
                    f"python -m tests.fuzz {fuzzer.name} --seed {seed} --first {index} --calls 1"
                )
                report.findings.append(Finding(index, ended, call, again, log))
                if index + 1 < child.last:
                    rests.append((index + 1, child.last))
    finally:
        for child in running:
            child.kill()
            child.close()
