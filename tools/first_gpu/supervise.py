"""Processes that work through items, several at a time, and what ends one of them.

A task is a list of items and the command of a process that works through them (``protocol.py``).
Where an item ends its process (a sticky CUDA error, a signal), hangs, or takes more memory than it
may, the item gets that outcome and a new process goes on behind it. A task that has had its time
makes room and goes on behind the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_gpu import launches
from first_gpu.protocol import DEAD_CONTEXT, shortened

Row = dict[str, Any]
_POLL = 0.1  # seconds
_STARTING = 90.0  # seconds until a process begins its first item
_PR_SET_PDEATHSIG = 1


@dataclass
class Task:
    """Items, and the process that works through them.

    Attributes:
        name: of the task and its files.
        command: of the process, without ``--items`` and ``--events``.
        items: what is left to do, in order.
        environment: added to that of the process.
        item_seconds: after which an item hangs.
        slice_seconds: after which the others come first.
        most_ends: how many items may end their process; then the rest is not run.
        codes: exit codes of a process that has done all its items.
        traced: whether an item that ends its process runs once more, alone, with
            ``CUDA_LAUNCH_BLOCKING=1``, to find the launch.
        shared: whether several tasks have the same items and claim them.
        trace_of: the row that this task, of one item, explains.
    """

    name: str
    command: Sequence[str]
    items: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    item_seconds: float = 60.0
    slice_seconds: float = 90.0
    most_ends: int = 8
    codes: Sequence[int] = (0,)
    traced: bool = False
    shared: bool = False
    trace_of: Row | None = None
    ends: int = 0
    processes: int = 0


class _Running:
    """A process of a task."""

    def __init__(self, task: Task, folder: Path) -> None:
        task.processes += 1
        stem = folder / f"{task.name}.{task.processes}"
        self.task = task
        self.launch = stem.with_suffix(stem.suffix + ".launch")
        self.log = stem.with_suffix(stem.suffix + ".log")
        items = stem.with_suffix(stem.suffix + ".items")
        events = stem.with_suffix(stem.suffix + ".events")
        items.write_text(json.dumps(task.items))
        events.touch()
        self._events = events.open(encoding="utf-8")
        self._partial = ""
        self.started = self.last_event = time.monotonic()
        self.item: str | None = None
        environment = {**os.environ, **task.environment, "FIRST_GPU_LAUNCH": str(self.launch)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*task.command, "--items", str(items), "--events", str(events)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def events(self) -> list[Row]:
        """Return the events that came since the last call."""
        text = self._partial + self._events.read()
        *lines, self._partial = text.split("\n")
        if lines:
            self.last_event = time.monotonic()
        return [json.loads(line) for line in lines]

    def quiet_for_too_long(self) -> bool:
        """Return whether the item that runs, or the start, takes longer than it may."""
        limit = self.task.item_seconds + (_STARTING if self.item is None else 0.0)
        return time.monotonic() - self.last_event > limit

    def memory(self) -> int:
        """Return the bytes of memory that the process occupies."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failure(self, why: str) -> Row:
        """Return the row of the item that ended this process."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return {
            "item": self.item,
            "outcome": "crashed",
            "seconds": round(time.monotonic() - self.last_event, 3),
            "error": why,
            "text": shortened(text),
            "launch": launches.last(self.launch, self.item),
        }


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """Runs tasks.

    Args:
        folder: for the files of the processes.
        say: called with each row: ``task``, ``item``, ``outcome`` (``passed``, ``failed``,
            ``skipped``, ``crashed``, ``not run``), ``seconds``, and with failures ``error``,
            ``text``, ``launch``.
        tick: called about ten times a second.
        memory: bytes of memory that one process may occupy.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[Row], None],
        tick: Callable[[], None] = lambda: None,
        memory: float = float("inf"),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._say, self._tick, self._memory = folder, say, tick, memory
        self._running: list[_Running] = []
        self._queue: deque[Task] = deque()
        self._done: set[tuple[bool | str, str]] = set()

    def run(self, tasks: Sequence[Task], processes: int, seconds: float) -> int:
        """Run tasks in their order, so many at a time.

        Args:
            tasks: in the order of their starts.
            processes: how many run at a time.
            seconds: after which all are ended.

        Returns:
            How many items time did not reach; items that several tasks share count once.
        """
        end = time.monotonic() + seconds
        self._queue = deque(tasks)
        try:
            while (self._queue or self._running) and time.monotonic() < end:
                while self._queue and len(self._running) < processes:
                    self._running.append(_Running(self._queue.popleft(), self._folder))
                for each in list(self._running):
                    self._look_at(each)
                self._tick()
                time.sleep(_POLL)
        finally:
            for each in self._running:
                self._read(each)
                each.kill()
            left = [*self._queue, *(each.task for each in self._running)]
            self._running = []
        unreached = {(_owner(task), item) for task in left for item in task.items}
        return len(unreached - self._done)

    def _look_at(self, each: _Running) -> None:
        code = each.process.poll()
        self._read(each)
        task = each.task
        if code is None:
            if each.memory() > self._memory:
                each.kill()
                self._ended(each, f"took more than {self._memory / 2**30:.1f} GiB of memory")
            elif each.quiet_for_too_long():
                each.kill()
                self._ended(each, f"hung: no result after {task.item_seconds:.0f} s")
            elif self._queue and time.monotonic() - each.started > task.slice_seconds:
                each.kill()
                self._leave(each, self._queue.append)
            return
        if code in task.codes and each.item is None:
            task.items.clear()
            self._leave(each, None)
        elif code == DEAD_CONTEXT and each.item is None:
            task.ends += 1
            self._leave(each, self._queue.appendleft)
        else:
            self._ended(each, _exit_words(code))

    def _read(self, each: _Running) -> None:
        for event in each.events():
            if "start" in event:
                each.item = event["start"]
                continue
            each.item = None
            item = event.pop("end")
            self._done.add((_owner(each.task), item))
            if item in each.task.items:
                each.task.items.remove(item)
            row = {"item": item, **event}
            if row["outcome"] == "crashed":
                row["launch"] = launches.last(each.launch, item)
            self._deliver(each.task, row)

    def _ended(self, each: _Running, why: str) -> None:
        """A process ended in the middle of an item, or before the first."""
        task = each.task
        task.ends += 1
        row = each.failure(why)
        if each.item is None:
            row["item"] = f"process of {task.name}"
            task.ends = task.most_ends
        elif each.item in task.items:
            task.items.remove(each.item)
        self._deliver(task, row)
        self._leave(each, self._queue.appendleft)

    def _leave(self, each: _Running, again: Callable[[Task], None] | None) -> None:
        task = each.task
        self._running.remove(each)
        if task.ends >= task.most_ends and task.items and not task.shared:
            for item in task.items:
                why = f"{task.name} ended {task.ends} processes"
                self._say({"task": task.name, "item": item, "outcome": "not run", "error": why})
            task.items = []
        if task.items and again is not None and task.trace_of is None:
            # In front of it is the run that traces what ended it.
            traces = []
            while self._queue and self._queue[0].trace_of is not None:
                traces.append(self._queue.popleft())
            again(task)
            self._queue.extendleft(reversed(traces))

    def _deliver(self, task: Task, row: Row) -> None:
        if task.trace_of is not None:
            failed = row["outcome"] in ("crashed", "failed")
            traced = row.get("launch") if row["outcome"] == "crashed" else None
            self._say(
                {
                    **task.trace_of,
                    "launch": traced or task.trace_of.get("launch"),
                    "blocking": row.get("error") or row.get("text", "")
                    if failed
                    else "does not fail alone with CUDA_LAUNCH_BLOCKING=1",
                }
            )
            return
        row = {"task": task.name, **row}
        self._say(row)
        if task.traced and row["outcome"] == "crashed" and "::" in row["item"]:
            trace = Task(
                f"{task.name}-trace{task.ends}",
                task.command,
                [row["item"]],
                # Without plans each launch goes through Python, where it is recorded.
                {**task.environment, "CUDA_LAUNCH_BLOCKING": "1", "FUSEDOPS_LAUNCH_PLANS": "0"},
                item_seconds=task.item_seconds,
                most_ends=1,
                trace_of=row,
            )
            self._queue.appendleft(trace)


def _owner(task: Task) -> bool | str:
    """Return what tells an item of a task from items of the same name of others."""
    return task.shared or task.name


def _exit_words(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
