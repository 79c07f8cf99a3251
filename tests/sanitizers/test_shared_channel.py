"""Collectives through shared memory under the sanitizers of addresses, of types and of threads.

Memory that processes share is invisible to a sanitizer: the ranks of ``shared_channel.cpp`` are
threads of one process over one mapping, with the same C++ protocol.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .harness import HERE, ROOT, assert_clean, build, run

SOURCES = [HERE / "shared_channel.cpp", ROOT / "csrc/runtime/shared_memory/sum.isa.cpp"]
KERNELS = ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")
PROGRAMS, SEED = "120", "0"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_drawn_programs_are_clean(tmp_path: Path, sanitizer: str) -> None:
    program = build(tmp_path, SOURCES, sanitizer, KERNELS)
    assert_clean(run(program, PROGRAMS, SEED, seconds=600.0))
