"""Kernels for AVX-512 run on processors without its bfloat16 instructions.

The instructions are written in assembly behind a question at run time, and a compiler may move such
code ahead of the question. So a copy of the library has an illegal instruction in the place of each
of them, and all ops run in bfloat16, forward and backward, as on a processor that lacks them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import fresh_process
import pytest
import torch

from fusedops._core import env

LIBRARY = env.library_folder() / "libfusedops_cpu.so"
OPTIONAL = "vcvtneps2bf16|vcvtne2ps2bf16|vdpbf16ps"
ILLEGAL = b"\x0f\x0b"  # ud2

RUN_ALL_OPS = """
import fusedops, fusedops.optim, torch
from fusedops.specs import all_specs
from fusedops.specs.comparison import run

for spec in all_specs().values():
    for sample in spec.samples(torch.device("cpu"), torch.bfloat16):
        print(spec.name, sample.name, flush=True)
        run(spec.op, sample)
weight = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
weight.grad = weight.detach().clone()
fusedops.optim.AdamW([weight]).step()
"""

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="the kernels are not compiled"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no AVX-512 here"
    ),
]


def without_optional_instructions(library: Path, copy: Path) -> int:
    """Write a copy of a library in which each optional instruction is illegal; return how many."""
    command = ["objdump", "-h", "-d", "--section=.text", library]
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = re.search(r"\.text\s+\w+\s+(\w+)\s+\w+\s+(\w+)", dump)
    assert section is not None
    address, offset = (int(number, 16) for number in section.groups())
    content = bytearray(library.read_bytes())
    instructions = re.findall(rf"^ *([0-9a-f]+):\t.*\t(?:{OPTIONAL}) ", dump, re.MULTILINE)
    for instruction in instructions:
        place = int(instruction, 16) - address + offset
        content[place : place + len(ILLEGAL)] = ILLEGAL
    copy.write_bytes(content)
    return len(instructions)


def run_all_ops(folder: Path, isa: str) -> subprocess.CompletedProcess[str]:
    variables = {"FUSEDOPS_LIBRARY": str(folder), "FUSEDOPS_MAX_ISA": isa}
    return fresh_process.run(RUN_ALL_OPS, **variables)


@pytest.mark.ci
def test_no_op_executes_a_bfloat16_instruction_that_the_processor_lacks(tmp_path: Path) -> None:
    shutil.copytree(LIBRARY.parent, tmp_path, dirs_exist_ok=True)
    if without_optional_instructions(LIBRARY, tmp_path / LIBRARY.name) == 0:
        pytest.skip("this build has no kernels for AVX-512")
    done = run_all_ops(tmp_path, "avx512")
    assert done.returncode == 0, f"{done.stdout[-200:]}\n{done.stderr[-2000:]}"
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text():  # the copy traps what it should
        assert run_all_ops(tmp_path, "avx512_bf16").returncode == -4
