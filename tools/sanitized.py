"""Runs Python with the kernels built to watch each access: out of bounds, freed, misaligned.

    python tools/sanitized.py -m pytest -q tests/ops
    python tools/sanitized.py -m tests.fuzz operators --calls 20000

Builds the CPU library with ``FUSEDOPS_SANITIZE`` (``address,undefined`` unless it is set) in a
folder of its own, and replaces itself by Python with the sanitizers' libraries loaded first. The
first error ends the process, with its stack on stderr.

torch is not instrumented: what it reads and writes by itself is not watched, but the memory that it
hands to the kernels is, because it comes from malloc. Loads and stores through a mask are single
instructions that the compiler does not instrument; those without one are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("FUSEDOPS_SANITIZE", "address,undefined")
import native

OPTIONS = {
    "ASAN_OPTIONS": (
        # Python and torch keep memory for the life of the process. A call with absurd sizes must
        # fail as on a machine without that much memory.
        "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:max_allocation_size_mb=4096:"
        # Objects that Python loads may hold the same inline variables; freed blocks are kept for
        # 64 MB, not 256: a forked child copies them.
        "detect_odr_violation=0:quarantine_size_mb=64:handle_segv=1"
    ),
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
    "FUSEDOPS_LIBRARY": str(native.LIBRARIES),
}


def environment() -> dict[str, str]:
    """Return the variables under which the library of a sanitizer's build works."""
    # The C++ library beside them: the sanitizer looks for its `throw` when it is loaded.
    libraries = [_library(f"lib{name}.so") for name in ("asan", "ubsan", "stdc++")]
    wanted = {"LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "1", **OPTIONS}
    return {**os.environ, **{k: v for k, v in wanted.items() if k not in os.environ}}


def _library(name: str) -> str:
    command = [native.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).exists():
        raise native.CannotBuildError(f"the compiler has no {name} (Debian: part of g++)")
    return path


if __name__ == "__main__":
    try:
        native.build()
        os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
    except native.BuildError as problem:
        sys.exit(f"fusedops: {problem}")
