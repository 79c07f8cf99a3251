"""That the sanitizers' build (``make test-asan``) sees what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fusedops._core import env

# Past the contract: the C++ kernel itself, with a gradient that is shorter than the input.
OVERREAD = (
    "import torch, fusedops\n"
    "torch.ops.fusedops_cpp.gelu_backward(torch.ones(3), torch.ones(3000), 'none', [True])\n"
)


def _is_sanitized() -> bool:
    stamp = env.library_folder() / "libfusedops_cpu.json"
    return stamp.exists() and "-fsanitize=address" in json.loads(stamp.read_text())["flags"]


@pytest.mark.skipif(not _is_sanitized(), reason="needs a sanitizers' build: make test-asan")
def test_a_read_past_the_end_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", OVERREAD], capture_output=True, text=True)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr and "gelu.isa.cpp" in done.stderr
