"""A watchdog over the progress of all processes: one that hangs is named, and the job ends.

A process that hangs leaves the others waiting for it in a communication, which no timeout of theirs
can tell from one that is slow. On each process a thread looks for progress. Where there is none for
the time that the configuration gives, it writes a record of its process (``flight_record.py``),
another thread shares the record through the store of the rendezvous, one process names the rank
that all wait for, and every process ends. A process that writes no record is known by its missing
heartbeat: it holds the interpreter's lock (a timer's signal writes its stack then), it is stopped,
its machine is gone, or the link is cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import json
import math
import os
import signal
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from fusedops._core import env
from fusedops.launch import flight_record
from fusedops.launch.flight_record import FlightRecord
from fusedops.launch.processes import Ranks
from fusedops.launch.run_folder import FAULTS

_CHECKS = 10  # in the time after which a process is said to hang
_LONGEST_PERIOD_SECONDS = 5.0
_SHOWN_CALLS = 8


class Watchdog:
    """Ends the job when this process makes no progress; a context manager.

    Args:
        ranks: the processes.
        folder: of the run; what a fault leaves goes into ``faults`` there.
        seconds: without progress after which a process is said to hang; 0: no watchdog.
    """

    def __init__(self, ranks: Ranks, folder: Path, seconds: float) -> None:
        self._ranks, self._folder, self._seconds = ranks, folder / FAULTS, seconds
        self._period = min(_LONGEST_PERIOD_SECONDS, seconds / _CHECKS)
        self._phase = (0, "step")
        self._ended, self._stuck, self._reported = (threading.Event() for _ in range(3))
        self._record: FlightRecord | None = None
        self._threads: list[threading.Thread] = []

    def set_phase(self, step: int, what: str) -> None:
        """Note what this process does from now on; costs nothing."""
        self._phase = (step, what)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stacks = self._stacks_of(self._ranks.rank).open("w")
            self._timer = _StackTimer(self._stacks)
            self._timer.restart(self._seconds)
            for work in (self._check_progress, self._send_heartbeats):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if not self._seconds:
            return
        self._ended.set()
        self._stuck.set()  # wakes the thread of heartbeats, which then sees that all has ended
        for thread in self._threads:
            thread.join(self._period)
        self._timer.close()  # after the thread that restarts it
        if isinstance(error, RuntimeError) and self._ranks.size > 1:
            self._save_record(f"{error}")
        self._stacks.close()
        self._stacks_of(self._ranks.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # unless something is in it

    def _check_progress(self) -> None:
        """Look for progress, and end the process where there is none."""
        last, idle, checked = None, 0.0, time.monotonic()
        while not self._ended.wait(self._period):
            self._timer.restart(self._seconds)
            now, progress = time.monotonic(), (*self._phase, flight_record.num_collectives())
            # A machine that was suspended is no process that hangs.
            idle += min(now - checked, 2 * self._period)
            checked = now
            if progress != last:
                last, idle = progress, 0.0
            elif idle >= self._seconds:
                self._record = self._save_record("hangs, or waits for one that does")
                self._stuck.set()
                if not self._reported.wait(2 * self._grace):
                    rank, folder = self._ranks.rank, self._folder
                    _print_error(
                        f"process {rank} waits in vain, and cannot reach the others: see {folder}"
                    )
                os._exit(1)

    def _send_heartbeats(self) -> None:
        """Send heartbeats to the others; when this process is stuck, find the stragglers."""
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
            store.set(f"record-{rank}", json.dumps(asdict(self._record)))
            # One process reads what all have written: of many, each would flood the store.
            is_reporter = store.add("reporters", 1) == 1
            before = _values(store, "beat", size) if is_reporter else {}
            # The others come to their end at about the same time: when one has begun the
            # communication that another never comes to.
            time.sleep(self._grace)
            if is_reporter:
                texts, after = _values(store, "record", size), _values(store, "beat", size)
                records = {rank: FlightRecord(**json.loads(text)) for rank, text in texts.items()}
                slow = [rank for rank, beat in after.items() if beat != before.get(rank)]
                _print_error(self._diagnosis(records, slow))
                store.set("reported", "")
            store.wait(["reported"])  # the first process that ends, ends all
        except dist.DistError:
            return
        self._reported.set()

    @property
    def _grace(self) -> float:
        """Seconds in which processes that hang together notice it."""
        return max(1.0, 4 * self._period)

    def _save_record(self, why: str) -> FlightRecord:
        """Write what this process does, and its last collectives, into the folder."""
        record = flight_record.current_record(self._ranks.rank, *self._phase)
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{now}.{env.restarts()}-rank-{record.rank:05d}.json"
        kept = {"why": why, **asdict(record), "collectives": flight_record.collectives()}
        with contextlib.suppress(OSError):  # a full disk must not keep the job from ending
            (self._folder / name).write_text(json.dumps(kept, indent=1))
        return record

    def _stacks_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.stack"

    def _diagnosis(self, records: Mapping[int, FlightRecord], slow: Sequence[int]) -> str:
        """Return which ranks all others wait for, and their stacks."""
        stragglers, why = find_stragglers(records, self._ranks.size, slow)
        lines = [f"no progress for {self._seconds:g} seconds: {why}"]
        for rank in stragglers[:2]:
            if rank in records:
                record = records[rank]
                lines.append(f"process {rank} ({record.host}, pid {record.pid}) stands here:")
                lines += record.stack.splitlines()[-2 * _SHOWN_CALLS :]
            else:
                with contextlib.suppress(OSError):
                    stack = self._stacks_of(rank).read_text().splitlines()
                    lines += [f"process {rank} stands here:", *stack] if stack else []
        return "\n".join([*lines, f"the records of all are in {self._folder}"])


class _StackTimer:
    """Writes the stack of the thread that makes it when ``restart`` is not called in time.

    A signal interrupts that thread, which then writes its own stack without the interpreter's lock.
    faulthandler's own timer reads the frames of running threads from another one: it crashed two
    of a hundred processes that went on after SIGSTOP.
    """

    _SIGNAL = signal.SIGRTMIN + 12  # which Python, torch and NCCL leave alone

    def __init__(self, file: TextIO) -> None:
        faulthandler.register(self._SIGNAL, file, all_threads=False)
        self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._timer = ctypes.c_void_p()
        sigev_thread_id = 4  # struct sigevent: value, signal, kind of notification, thread
        event = (0, self._SIGNAL, sigev_thread_id, threading.get_native_id())
        packed = struct.pack("qiii44x", *event)
        if self._library.timer_create(time.CLOCK_MONOTONIC, packed, ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "cannot create a timer for the watchdog")

    def restart(self, seconds: float) -> None:
        fraction, whole = math.modf(seconds)
        once = struct.pack("qqqq", 0, 0, int(whole), int(fraction * 1e9))  # interval, first time
        self._library.timer_settime(self._timer, 0, once, None)

    def close(self) -> None:
        self._library.timer_delete(self._timer)
        faulthandler.unregister(self._SIGNAL)


def find_stragglers(
    records: Mapping[int, FlightRecord], size: int, slow: Sequence[int]
) -> tuple[list[int], str]:
    """Return which ranks the others wait for, and a sentence that says so.

    Args:
        records: of the ranks that found themselves without progress.
        size: how many ranks there are.
        slow: those that are without a record, and alive.
    """
    missing = [rank for rank in range(size) if rank not in records]
    if silent := [rank for rank in missing if rank not in slow]:
        return silent, f"{_named(silent)} silent: stopped, cut off, or holding Python's lock"
    if missing:
        return missing, f"{_named(missing)} still at work, and the others wait"
    if working := [rank for rank, record in records.items() if record.waits is None]:
        places = sorted({f"{records[rank].what} {records[rank].step}" for rank in working})
        return working, f"{_named(working)} hanging in {', '.join(places)}, waiting for nobody"
    most: Counter[str] = Counter()  # the largest number of a collective, by group
    for record in records.values():
        most |= Counter(record.groups)
    ordered = sorted(records.items())
    behind = [
        rank
        for rank, record in ordered
        if any(number < most[name] for name, number in record.groups.items())
    ]
    waits = "; ".join(f"process {rank} in {record.waits}" for rank, record in ordered)
    if behind:
        return behind, f"{_named(behind)} behind the others, and all wait: {waits}"
    return [], f"all wait for each other, as where a link is cut: {waits}"


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"process {numbers} is" if len(ranks) == 1 else f"processes {numbers} are"


def _values(store: dist.Store, name: str, size: int) -> dict[int, bytes]:
    """Return what ranks have written under a name; those that have not are left out."""
    ranks = [rank for rank in range(size) if store.check([f"{name}-{rank}"])]
    return {rank: store.get(f"{name}-{rank}") for rank in ranks}


def _print_error(text: str) -> None:
    print(f"fusedops: error: {text}", file=sys.stderr, flush=True)
