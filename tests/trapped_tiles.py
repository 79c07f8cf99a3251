"""Runs Python with the tile instructions of AMX executed in software, on a processor without them.

    python tests/trapped_tiles.py -m pytest -q -p no:faulthandler tests/ops/test_products.py

Builds ``tests/tile_trap.cpp`` in build/tile_trap and replaces itself by Python with that library
loaded first and ``FUSEDOPS_MAX_ISA=amx_trapped``: the kernels then run the instructions that were
built, and a use that the manual forbids ends the process. It needs AVX-512 with bfloat16. Python's
faulthandler would take the trap's place: pytest must leave it off.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import native

SOURCE = Path(__file__).with_name("tile_trap.cpp")
FLAGS = ("-std=c++20", "-O3", "-mavx2", "-mfma", "-fPIC", "-fvisibility=hidden", "-shared")


def library() -> Path:
    """Return the library that traps, built if it is not there.

    Raises:
        BuildError: no compiler, or the compiler failed.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    path = native.ROOT / "build" / "tile_trap" / f"libtile_trap-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".so.{os.getpid()}")
        command = [native.compiler(), *FLAGS, str(SOURCE), "-o", str(fresh)]
        if subprocess.run(command).returncode:
            raise native.BuildError("compiling tests/tile_trap.cpp failed; see the message above")
        os.replace(fresh, path)
    return path


def environment() -> dict[str, str]:
    """Return the variables under which a process traps the tile instructions."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    loaded = " ".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD")]))
    return {**others, "LD_PRELOAD": loaded, "FUSEDOPS_MAX_ISA": "amx_trapped"}


if __name__ == "__main__":
    try:
        os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
    except native.BuildError as problem:
        sys.exit(f"fusedops: {problem}")
