"""Runs calls in forked children, so that a call that kills its process is known and the rest go on.

A call is made from the seed and its number alone. A child writes the number of the call in flight
into shared memory before it runs it; where the child dies or hangs, the parent knows which call it
was, runs it once more in a child of its own, and goes on behind it. What a child counts stands in
shared memory too: a death loses nothing.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

# Kinds of outcome of a call that is no finding; an exception of another type is counted as "other".
OUTCOMES = (
    "returned",
    "skipped",
    "ValueError",
    "TypeError",
    "IndexError",
    "RuntimeError",
    "UnsupportedError",
    "NotImplementedError",
    "OutOfMemoryError",
    "other",
)
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
        """Make a call and run it; return one of ``OUTCOMES``.

        Raises:
            WrongResultError: the result is wrong.
        """

    def describe(self, rng: random.Random) -> tuple[str, str]:
        """Return the op of the call that ``run`` makes of ``rng``, and code that makes it."""


@dataclass
class Finding:
    """A call that must not end as it did."""

    op: str
    outcome: str
    index: int
    seed: int
    again: str
    snippet: str
    log: str


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
        rate = self.calls / max(self.seconds, 1e-9)
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        lines = [
            f"{self.fuzzer}: seed {self.seed}, {self.calls} calls in {self.seconds:.0f} s "
            f"({rate:.0f} a second): {counts or 'nothing'}; {len(self.findings)} findings"
        ]
        by_kind = collections.Counter((finding.op, finding.outcome) for finding in self.findings)
        for (op, outcome), count in by_kind.most_common():
            first = next(f for f in self.findings if (f.op, f.outcome) == (op, outcome))
            lines.append(f"  {count} x {op}: {outcome}, first at call {first.index}")
        return "\n".join(lines)


def rng_of(seed: int, index: int) -> random.Random:
    """Return the random numbers of one call."""
    return random.Random(seed << 40 | index)


class _Child:
    """A forked process that runs the calls ``[first, last)``, as its parent sees it."""

    def __init__(self, fuzzer: Fuzzer, seed: int, first: int, last: int, log: Path) -> None:
        self.first, self.last, self.log = first, last, log
        self.shared = mmap.mmap(-1, 8 * (1 + len(OUTCOMES)))
        self._at(0, first)
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

    def _at(self, place: int, value: int) -> None:
        struct.pack_into("q", self.shared, 8 * place, value)

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("q", self.shared, 8 * place)[0])

    @property
    def index(self) -> int:
        """The number of the call in flight."""
        return self._get(0)

    def counts(self) -> collections.Counter[str]:
        """Return how the calls ended that did."""
        numbers = {name: self._get(1 + place) for place, name in enumerate(OUTCOMES)}
        return collections.Counter({name: count for name, count in numbers.items() if count})

    def _run(self, fuzzer: Fuzzer, seed: int) -> None:
        for descriptor in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.stderr = os.fdopen(2, "w", buffering=1)  # pytest has another
        faulthandler.enable()
        if "ASAN_OPTIONS" not in os.environ:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        counts = [0] * len(OUTCOMES)
        places = {name: place for place, name in enumerate(OUTCOMES)}
        for index in range(self.first, self.last):
            self._at(0, index)
            outcome = fuzzer.run(rng_of(seed, index))
            place = places.get(outcome, places["other"])
            counts[place] += 1
            self._at(1 + place, counts[place])

    def poll(self, patience: float) -> str | None:
        """Return how the process ended (``""``: well), or ``None`` while it runs; end a hang."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            now, spent = time.monotonic(), _processor_seconds(self.pid)
            if self.index != self.seen:
                self.seen, self.since, self.spent = self.index, now, spent
            # A machine that is busy with other things is no hang, but a call that waits is.
            if spent - self.spent < patience and now - self.since < WAITS * patience:
                return None
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return f"hangs for {patience:.0f} s"
        if os.WIFSIGNALED(status):
            return f"dies of {signal.Signals(os.WTERMSIG(status)).name}"
        code = os.WEXITSTATUS(status)
        return {0: "", 3: "wrong result"}.get(code, f"exits with {code}")

    def output(self) -> str:
        """Return the last lines that the process wrote."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[:KEPT_LINES])


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
    progress: bool = False,
) -> Report:
    """Run calls ``[first, first + calls)`` of a seed and return what they did.

    Args:
        fuzzer: makes the calls.
        seed: of all calls.
        calls: how many.
        folder: where the findings are written, a line of JSON each.
        processes: how many children at a time.
        first: number of the first call.
        seconds: no batch begins after this time.
        patience: a call that takes longer hangs (seconds of the processor).
        most_findings: no batch begins after so many.
        progress: whether to tell on stderr.
    """
    torch.set_num_threads(1)  # a forked child has only the thread that forked
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{fuzzer.name}-{seed}.jsonl"
    written.unlink(missing_ok=True)
    report = Report(fuzzer.name, seed)
    gc.collect()
    gc.freeze()
    began = told = time.monotonic()
    todo: list[tuple[int, int]] = []
    following, end = first, first + calls
    running: list[_Child] = []
    try:
        while True:
            report.seconds = time.monotonic() - began
            late = report.seconds > seconds or len(report.findings) >= most_findings
            while len(running) < processes and not late and (todo or following < end):
                if not todo:
                    todo.append((following, min(end, following + fuzzer.batch)))
                    following = todo[-1][1]
                log = folder / f"{fuzzer.name}-{os.getpid()}-{todo[-1][0]}.log"
                running.append(_Child(fuzzer, seed, *todo.pop(), log))
            if not running:
                break
            time.sleep(0.005)
            for child in list(running):
                ended = child.poll(patience)
                if ended is None:
                    continue
                running.remove(child)
                report.counts += child.counts()
                if ended:
                    finding = _finding(fuzzer, seed, child, ended, patience)
                    report.findings.append(finding)
                    with written.open("a") as file:
                        file.write(json.dumps(asdict(finding)) + "\n")
                    if child.index + 1 < child.last:
                        todo.append((child.index + 1, child.last))
                child.log.unlink(missing_ok=True)
                child.shared.close()
            if progress and time.monotonic() - told > 10:
                told = time.monotonic()
                print(str(report).splitlines()[0], file=sys.stderr, flush=True)
    finally:
        for child in running:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.log.unlink(missing_ok=True)
    return report


def _finding(fuzzer: Fuzzer, seed: int, child: _Child, ended: str, patience: float) -> Finding:
    """Describe how a child ended, after its last call has had a child of its own."""
    index, log = child.index, child.output()
    op, snippet = fuzzer.describe(rng_of(seed, index))
    alone = _Child(fuzzer, seed, index, index + 1, child.log.with_suffix(".again"))
    while (again := alone.poll(patience)) is None:
        time.sleep(0.005)
    if again:
        log = alone.output()
    alone.log.unlink(missing_ok=True)
    rerun = f"python -m tests.fuzz {fuzzer.name} --seed {seed} --first {index} --calls 1"
    return Finding(
        op=op,
        outcome=ended,
        index=index,
        seed=seed,
        again=again or f"not alone, but after the calls from {child.first} on",
        snippet=f"# {rerun}\n{snippet}",
        log=log,
    )
