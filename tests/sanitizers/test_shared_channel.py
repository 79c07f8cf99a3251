"""Collectives through shared memory under the sanitizers of addresses, of types and of threads.

Memory that processes share is invisible to a sanitizer: the ranks of ``shared_channel.cpp`` are
threads of one process over one mapping, with the same C++ protocol.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread")
INCLUDES = (f"-I{ROOT / 'csrc'}", f"-isystem{Path(torch.__file__).parent / 'include'}")
KERNELS = ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_drawn_programs_are_clean(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "shared_channel"
    sources = (HERE / "shared_channel.cpp", ROOT / "csrc/cpu/shared_sum.isa.cpp")
    options = (*FLAGS, *INCLUDES, *KERNELS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    command = [compiler, *options, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"the compiler has no library for {sanitizer}")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    done = subprocess.run(
        [str(program), "120", "0"], capture_output=True, text=True, timeout=600, env=environment
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer of this compiler needs sysctl vm.mmap_rnd_bits=28")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Sanitizer" not in done.stderr, done.stderr
