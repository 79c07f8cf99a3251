"""Compiles a C++ program with a sanitizer of the compiler and runs it.

Python and torch are not instrumented, so that a thread sanitizer cannot watch a Python process. A
program in this folder links the sources that it tests without either.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FLAGS = (
    *("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread"),
    "-fno-sanitize-recover=all",
)
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:second_deadlock_stack=1",
    "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def build(
    folder: Path, sources: Sequence[Path], sanitize: str, options: Sequence[str] = ()
) -> Path:
    """Compile and link sources with ``-fsanitize=<sanitize>`` and return the program.

    A machine without the compiler, or without the sanitizer's library, skips the test.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    names = {"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}
    for part in sanitize.split(","):
        command = [compiler, f"-print-file-name={names[part]}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).exists():
            pytest.skip(f"the compiler has no {names[part]}")
    program = folder / f"{sources[0].stem}_{sanitize.replace(',', '_')}"
    include = Path(torch.__file__).parent / "include"  # c10's half precision types, headers only
    flags = [*FLAGS, f"-fsanitize={sanitize}", f"-I{ROOT / 'csrc'}", f"-isystem{include}"]
    command = [compiler, *flags, *options, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a program with the sanitizers' options and return how it ended."""
    done = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **OPTIONS},
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer of this compiler needs sysctl vm.mmap_rnd_bits=28")
    return done


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    """Raise unless the program ended well, without a report of a sanitizer."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
