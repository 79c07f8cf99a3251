"""Steps of the processes in ``test_bench_device.py``, which must be importable by name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fusedops.bench.teams import TeamSetting, interleaved


def make(folder: str, name: str) -> Callable[[], float]:
    """Return a step that writes the states of the other settings' processes into a file."""
    own = Path(folder) / f"{name}.pid"
    own.write_text(str(os.getpid()))

    def step() -> float:
        others = [path for path in Path(folder).glob("*.pid") if path != own]
        states = [state_of(int(path.read_text())) for path in others]
        with (Path(folder) / f"{name}.states").open("a") as file:
            file.write("".join(states) + "\n")
        time.sleep(0.02)
        return 1.0

    return step


def state_of(pid: int) -> str:
    """Return the letter of a process's state in Linux: ``T`` is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def settings(folder: str) -> list[TeamSetting]:
    """Return two settings of one process each."""
    return [TeamSetting(name, 1, 1, partial(make, folder, name)) for name in ("first", "second")]


if __name__ == "__main__":
    interleaved(settings(sys.argv[1]), 60.0, lambda _: None)
