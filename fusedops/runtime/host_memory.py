"""How much host memory is available, to check before large allocations."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # of a container, where it is the second version


def available_bytes() -> int | None:
    """Return how many bytes can be allocated without swapping; ``None`` if unknown."""
    try:
        limits = [_number(_MEMORY, "MemAvailable:") * 1024]
    except (OSError, ValueError):
        return None
    try:
        used = int((_GROUP / "memory.current").read_text())
        used -= _number(_GROUP / "memory.stat", "inactive_file")  # reclaimable
        limits.append(int((_GROUP / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # no container, or one without a limit
        pass
    return max(0, min(limits))


def _number(file: Path, word: str) -> int:
    for line in file.read_text().splitlines():
        if line.split()[:1] == [word]:
            return int(line.split()[1])
    raise ValueError(f"{file} has no {word}")
