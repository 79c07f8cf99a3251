"""The tiles of AMX, emulated or trapped, do what the manual says, and the same as a processor.

What the trap itself refuses, and the ops on it, are in test_trapped_tiles.py.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
import trapped_tiles

from fusedops._core import extension

pytestmark = pytest.mark.slow  # `make test-tiles` runs this file, in CI too

CASES = ("ordinary", "subnormal", "cancelling")
TINY = torch.finfo(torch.float32).tiny


def isa(**variables: str) -> str:
    """Return what the kernels of a new process run on."""
    command = "import torch, fusedops; print(torch.ops.fusedops_native.isa_in_use())"
    environment = {k: v for k, v in os.environ.items() if k != "FUSEDOPS_MAX_ISA"} | variables
    run = [sys.executable, "-c", command]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.strip()


@functools.cache
def best() -> str:
    """Return the best instruction set of this machine, or skip where there is no library."""
    if extension.cpu_library() is not None:
        pytest.skip("no compiled library")
    return isa()


def needs_emulation() -> None:
    """Skip where the kernels of AMX cannot even be emulated."""
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("the emulation needs AVX512_BF16")


def environment(form: str) -> dict[str, str]:
    """Return the variables of a process whose tiles are "emulated", "trapped" or "real"."""
    if form == "trapped":
        return trapped_tiles.environment()
    return {**os.environ, "FUSEDOPS_MAX_ISA": "amx_emulated" if form == "emulated" else "amx"}


def forms() -> tuple[str, ...]:
    """Return the forms of tiles that run here; skip where none does."""
    needs_emulation()
    return ("emulated", "real") if best() == "amx" else ("emulated", "trapped")


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers with the subnormal ones zero."""
    return torch.where(x.abs() < TINY, torch.zeros_like(x).copysign(x), x)


def by_the_manual(rows: torch.Tensor, columns: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return what TDPBF16PS is documented to give, 32 elements of k at a time.

    Each step is one multiply-add: exact in float64 for numbers of like size, then rounded.
    """
    left, right = flushed(rows.float()).double(), flushed(columns.float()).double()
    for first in range(0, rows.shape[1], 32):
        chains = torch.zeros(2, 32, 32)
        for k in range(first, first + 32):
            exact = chains[k % 2].double() + left[:, k : k + 1] * right[k : k + 1]
            chains[k % 2] = flushed(exact.float())
        sums = flushed(flushed(sums) + flushed(chains[0] + chains[1]))
    return sums


PROGRAM = """
import sys, torch, fusedops
product = torch.ops.fusedops_native.tile_product
emulated = sys.argv[2] == "emulated"
torch.save([product(*each, emulated) for each in torch.load(sys.argv[1])], sys.argv[1])
"""


def products(folder: object, form: str) -> list[torch.Tensor]:
    """Return tile_product of all operands in a new process with tiles of a form."""
    path = f"{folder}/{form}.pt"
    torch.save([operands(case) for case in CASES], path)
    run = [sys.executable, "-c", PROGRAM, path, form]
    subprocess.run(run, env=environment(form), check=True)
    found: list[torch.Tensor] = torch.load(path)
    return found


def operands(case: str) -> tuple[torch.Tensor, ...]:
    """Return rows [32, 96], columns [96, 32] and sums [32, 32]."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(32, 96, generator=generator)
    columns = torch.randn(96, 32, generator=generator)
    sums = torch.randn(32, 32, generator=generator)
    if case == "subnormal":
        rows, columns, sums = rows * 1e-19, columns * 1e-19, sums * 1e-38
        rows[::3] *= 1e-20
    if case == "cancelling":
        rows[:, 1::2], columns[1::2] = rows[:, ::2], -columns[::2]
    return rows.bfloat16(), columns.bfloat16(), sums


def test_tiles_of_each_form_do_what_the_manual_says(tmp_path: object) -> None:
    for form in forms():
        for case, result in zip(CASES, products(tmp_path, form), strict=True):
            assert torch.equal(result, by_the_manual(*operands(case))), f"{form}, {case}"


def test_the_emulation_gives_the_bits_of_the_instructions(tmp_path: object) -> None:
    emulated, built = (products(tmp_path, form) for form in forms())
    for case, left, right in zip(CASES, emulated, built, strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32)), case


EVERYWHERE = """
import os, sys, threading, torch, fusedops
x, weight, bias = (torch.randn(*size).bfloat16() for size in ((70, 96), (64, 96), (64,)))
results = []
def product():
    results.append(fusedops.linear_act(x, weight, bias, activation="gelu_tanh"))
    results.append(fusedops.linear_act(x[:3], weight, bias, activation="gelu_tanh"))
torch.set_num_threads(2)
product()
thread = threading.Thread(target=product)
thread.start()
thread.join()
torch.mm(x, weight.t())  # oneDNN's own use of the registers
product()
for other in (2, 4):
    assert torch.equal(results[0], results[other]) and torch.equal(results[1], results[other + 1])
assert torch.equal(results[0][:3], results[1])
torch.set_num_threads(1)  # no pool of threads survives a fork
child = os.fork()
if child == 0:
    product()
    os._exit(0 if torch.equal(results[0], results[6]) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_threads_and_forked_processes_have_tiles_of_their_own() -> None:
    for form in forms():
        subprocess.run([sys.executable, "-c", EVERYWHERE], env=environment(form), check=True)


def test_the_limit_is_obeyed() -> None:
    needs_emulation()
    for limit in ("avx512", "amx_emulated"):
        assert isa(FUSEDOPS_MAX_ISA=limit) == limit


def test_a_limit_below_what_was_built_says_so() -> None:
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("this machine has no AVX-512 kernels")
    program = "from fusedops._core import extension; print(extension.cpu_library())"
    environment = {**os.environ, "FUSEDOPS_MAX_ISA": "default"}
    run = [sys.executable, "-c", program]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "None" or "FUSEDOPS_MAX_ISA=default" in told
