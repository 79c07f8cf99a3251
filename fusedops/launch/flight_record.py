"""The last collectives of this process and its stack: the record that a fault leaves behind.

Torch's flight recorder keeps the last collectives of every backend, gloo's too, in a ring buffer of
negligible cost; it does not record point-to-point communications of gloo. Collectives through
shared memory have a record of their own (``runtime/shared_memory.py``).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

from fusedops.runtime import shared_memory

# Torch's stubs do not know the recorder.
_c10d: Any = _distributed_c10d
# In the frames of a thread that waits for another process.
_WAITING = (
    os.path.join("torch", "distributed", ""),
    os.path.join("parallel", "comm", "collectives.py"),
)


@dataclass(frozen=True)
class FlightRecord:
    """What a rank is doing."""

    rank: int
    host: str
    pid: int
    step: int
    what: str  # its activity: a step, validation, a checkpoint
    waits: str | None  # the communication that it waits in, in words; ``None`` if it does not wait
    groups: dict[str, int]  # by name, the number of the last collective that it has begun
    stack: str  # of its main thread, the innermost call last


def current_record(rank: int, step: int, what: str) -> FlightRecord:
    """Return the record of this process now; any thread may ask."""
    frames: Any = sys._current_frames()
    calls = traceback.extract_stack(frames[threading.main_thread().ident])
    stack = "".join(traceback.format_list(calls))
    entries = collectives()
    groups: dict[str, int] = {}
    for entry in entries:
        name = entry["process_group"][0]
        groups[name] = max(groups.get(name, 0), entry["collective_seq_id"])
    # What is only posted waits for nobody yet.
    pending = (entry for entry in entries if not entry["retired"] and entry["state"] != "posted")
    waits = next(map(_words, pending), None)
    if waits is None and any(part in calls[-1].filename for part in _WAITING):
        waits = calls[-1].name.strip("_")
    return FlightRecord(rank, socket.gethostname(), os.getpid(), step, what, waits, groups, stack)


def collectives() -> list[dict[str, Any]]:
    """Return the last collectives of this process, the oldest first, as torch's recorder has them.

    Of torch's none where it is switched off (``TORCH_FR_BUFFER_SIZE``).
    """
    entries = [entry for dump in _dumps() for entry in dump.get("entries", [])]
    entries += map(_entry, tuple(shared_memory.calls))
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def num_collectives() -> int:
    """Return a number that changes when this process begins or ends a collective."""
    names = ("last_enqueued_collective", "last_completed_collective")
    dumps = _dumps(includeCollectives=False)
    groups = [status for dump in dumps for status in dump.get("pg_status", {}).values()]
    return shared_memory.count() + sum(int(group[name]) for group in groups for name in names)


def _dumps(**options: bool) -> list[dict[str, Any]]:
    """Return what torch has recorded: NCCL's has a recorder of its own."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [json.loads(getattr(_c10d, name)(**options)) for name in names if hasattr(_c10d, name)]


def _entry(call: shared_memory.CollectiveCall) -> dict[str, Any]:
    """Return an entry in the form of torch's recorder."""
    name, description = call.group
    return {
        "process_group": [f"{name} in shared memory", description],
        "collective_seq_id": call.number,
        "profiling_name": f"shared:{call.kind}",
        "input_sizes": [list(call.shape)],
        "input_dtypes": [str(call.dtype).removeprefix("torch.")],
        "state": call.state,
        "retired": call.state == "completed",
        "time_created_ns": call.created_ns,
    }


def _words(entry: dict[str, Any]) -> str:
    kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    group = shared_memory.shown_group(*entry["process_group"])
    return f"{kind} {entry['collective_seq_id']} of the group {group}"
