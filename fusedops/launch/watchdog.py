"""A watch over the progress of all processes: one that hangs is named, and the job ends.

A process that hangs leaves the others waiting for it in a communication, which no timeout of theirs
can tell from one that is slow. On each process a thread looks whether anything goes on. Where
nothing has for the time that the configuration says, it writes down where its process stands
(``flight.py``), another thread tells it to the others through the store by which they found each
other, one of them tells the user who keeps all waiting, and every process ends. What cannot tell
any more is known by its silence: the interpreter's lock is held (the C library's timer writes the
stack then), the process is stopped, its machine is gone, the link is cut.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fusedops._core import env
from fusedops.launch import flight_record
from fusedops.launch.flight_record import Record
from fusedops.launch.processes import Ranks
from fusedops.launch.run_folder import FAULTS

_LOOKS = 10  # in the time after which a process is said to hang
_LONGEST_LOOK_SECONDS = 5.0
_SHOWN_CALLS = 8


class Watch:
    """Looks after the progress of this process while it is open.

    Args:
        ranks: the processes.
        folder: of the run; what a fault leaves goes into ``faults`` there.
        seconds: after which a process without any progress is said to hang; 0: there is no watch.
    """

    def __init__(self, ranks: Ranks, folder: Path, seconds: float) -> None:
        self._ranks, self._folder, self._seconds = ranks, folder / FAULTS, seconds
        self._period = min(_LONGEST_LOOK_SECONDS, seconds / _LOOKS)
        self._place = (0, "step")
        self._ended, self._stuck, self._told = (threading.Event() for _ in range(3))
        self._record: Record | None = None
        self._threads: list[threading.Thread] = []

    def at(self, step: int, what: str) -> None:
        """Note that this process has come to a place; costs nothing."""
        self._place = (step, what)

    def __enter__(self) -> Watch:
        if self._seconds:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stacks = self._stacks_of(self._ranks.rank).open("w")
            self._arm()
            for work in (self._look, self._speak):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._seconds:
            return
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(self._period)
        if isinstance(error, RuntimeError) and self._ranks.size > 1:
            self._keep(self._standing(), f"{error}")
        self._stacks.close()
        self._stacks_of(self._ranks.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # unless something is in it

    def _look(self) -> None:
        """Look for progress, and end the process where there is none."""
        before, idle, looked = None, 0.0, time.monotonic()
        while not self._ended.wait(self._period):
            now, place = time.monotonic(), (*self._place, flight_record.count())
            # A whole machine that was suspended is no process that hangs.
            idle += min(now - looked, 2 * self._period)
            looked = now
            if place != before:
                before, idle = place, 0.0
                self._arm()
            elif idle >= self._seconds:
                self._record = self._standing()
                self._keep(self._record, "hangs, or waits for one that does")
                self._stuck.set()
                if not self._told.wait(2 * self._grace):
                    rank = self._ranks.rank
                    _say(f"process {rank} waits in vain, and cannot reach the others: {self._way}")
                sys.stderr.flush()
                os._exit(1)

    def _arm(self) -> None:
        """Set the timer of C that writes all stacks; it needs no lock of the interpreter."""
        faulthandler.dump_traceback_later(self._seconds, file=self._stacks)

    def _speak(self) -> None:
        """Tell the others that this process is there; when it is stuck, ask who is to blame."""
        rank, size = self._ranks.rank, self._ranks.size
        mine: Any = self._ranks.store
        store = dist.PrefixStore("watch", mine.clone())  # a connection for each thread
        store.set_timeout(datetime.timedelta(seconds=self._grace))
        beat = 0
        try:
            while not self._stuck.wait(self._period) and not self._ended.is_set():
                beat += 1
                store.set(f"beat-{rank}", str(beat))
            if self._record is None:
                return
            store.set(f"record-{rank}", self._record.text())
            before = _found(store, "beat", size)
            # The others come to their end at about the same time: when one has begun the
            # communication that another never comes to.
            time.sleep(self._grace)
            records = {
                rank: Record.of(each) for rank, each in _found(store, "record", size).items()
            }
            after = _found(store, "beat", size)
            slow = [each for each, beat in after.items() if beat != before.get(each)]
            if store.add("told", 1) == 1:
                _say(self._sentence(records, slow))
                store.set("said", "")
            store.wait(["said"])  # the first process that ends, ends all
        except dist.DistError:
            return
        self._told.set()

    @property
    def _grace(self) -> float:
        """Seconds in which processes that hang together notice it."""
        return max(1.0, 4 * self._period)

    @property
    def _way(self) -> str:
        return f"see {self._folder}"

    def _standing(self) -> Record:
        return flight_record.taken(self._ranks.rank, *self._place)

    def _keep(self, record: Record, why: str) -> None:
        """Write a record and the last collectives into the folder."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{now}.{env.restarts()}-rank-{record.rank:05d}.json"
        kept = {"why": why, **json.loads(record.text()), "collectives": flight_record.collectives()}
        with contextlib.suppress(OSError):  # a full disk must not keep the job from ending
            (self._folder / name).write_text(json.dumps(kept, indent=1))

    def _stacks_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.stack"

    def _sentence(self, records: Mapping[int, Record], slow: Sequence[int]) -> str:
        """Return who keeps all others waiting, and its stack."""
        blamed, why = blame(records, self._ranks.size, slow)
        told = [f"no progress for {self._seconds:g} seconds: {why}"]
        for rank in blamed[:2]:
            if rank in records:
                found = records[rank]
                told.append(f"process {rank} ({found.host}, pid {found.pid}) stands here:")
                told += found.stack.splitlines()[-2 * _SHOWN_CALLS :]
            else:
                with contextlib.suppress(OSError):
                    lines = self._stacks_of(rank).read_text().splitlines()
                    told += [f"process {rank} stands here:", *lines] if lines else []
        return "\n".join([*told, f"the records of all are in {self._folder}"])


def blame(records: Mapping[int, Record], size: int, slow: Sequence[int]) -> tuple[list[int], str]:
    """Return which ranks keep the others waiting, and a sentence that says so.

    Args:
        records: of the ranks that found themselves without progress.
        size: how many ranks there are.
        slow: those that are without a record, and alive.
    """
    missing = [rank for rank in range(size) if rank not in records]
    silent = [rank for rank in missing if rank not in slow]
    if silent:
        return silent, f"{_named(silent)} silent: stopped, cut off, or holding Python's lock"
    if missing:
        return missing, f"{_named(missing)} still at work, and the others wait"
    working = [rank for rank, each in records.items() if each.waits is None]
    if working:
        places = sorted({f"{records[rank].what} {records[rank].step}" for rank in working})
        return working, f"{_named(working)} hanging in {', '.join(places)}, waiting for nobody"
    behind = _behind(records)
    waits = "; ".join(f"process {rank} in {each.waits}" for rank, each in sorted(records.items()))
    if behind:
        return behind, f"{_named(behind)} behind the others, and all wait: {waits}"
    return [], f"all wait for each other, as where a link is cut: {waits}"


def _behind(records: Mapping[int, Record]) -> list[int]:
    """Return the ranks that began fewer collectives of a group than others of it."""
    most: dict[str, int] = {}
    for each in records.values():
        for name, number in each.groups.items():
            most[name] = max(most.get(name, 0), number)
    return [
        rank
        for rank, each in sorted(records.items())
        if any(number < most[name] for name, number in each.groups.items())
    ]


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"process {ranks[0]} is"
    return f"processes {', '.join(map(str, ranks))} are"


def _found(store: dist.Store, name: str, size: int) -> dict[int, bytes]:
    """Return what ranks have written under a name; those that have not are left out."""
    there = [rank for rank in range(size) if store.check([f"{name}-{rank}"])]
    return {rank: store.get(f"{name}-{rank}") for rank in there}


def _say(text: str) -> None:
    print(f"fusedops: error: {text}", file=sys.stderr, flush=True)
