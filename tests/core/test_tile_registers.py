"""The emulation of AMX's tiles does what the instruction is said to do, and the same as AMX."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fusedops._core import extension

TINY = torch.finfo(torch.float32).tiny


def isa(**variables: str) -> str:
    """Return what the kernels of a new process run on."""
    command = "import torch, fusedops; print(torch.ops.fusedops_native.isa_in_use())"
    environment = {k: v for k, v in os.environ.items() if k != "FUSEDOPS_MAX_ISA"} | variables
    run = [sys.executable, "-c", command]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def best() -> str:
    """Return the best instruction set of this machine, or skip where there is no library."""
    if extension.cpu_library() is not None:
        pytest.skip("no compiled library")
    return isa()


def needs_emulation() -> None:
    """Skip where the kernels of AMX cannot even be emulated."""
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("the emulation needs AVX512_BF16")


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
rows, columns, sums = torch.load(sys.argv[1])
emulated = sys.argv[2] == "emulated"
torch.save(torch.ops.fusedops_native.tile_product(rows, columns, sums, emulated), sys.argv[1])
"""


def product(tensors: tuple[torch.Tensor, ...], folder: object, form: str) -> torch.Tensor:
    """Return tile_product of a new process, whose tiles may be emulated."""
    path = f"{folder}/{form}.pt"
    torch.save(tensors, path)
    limit = "amx_emulated" if form == "emulated" else "amx"
    subprocess.run(
        [sys.executable, "-c", PROGRAM, path, form],
        env={**os.environ, "FUSEDOPS_MAX_ISA": limit},
        check=True,
    )
    result = torch.load(path)
    assert isinstance(result, torch.Tensor)
    return result


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


@pytest.mark.parametrize("case", ["ordinary", "subnormal", "cancelling"])
def test_the_emulation_does_what_the_manual_says(case: str, tmp_path: object) -> None:
    needs_emulation()
    tensors = operands(case)
    got = product(tensors, tmp_path, "emulated")
    assert torch.equal(got, by_the_manual(*tensors))


@pytest.mark.parametrize("case", ["ordinary", "subnormal", "cancelling"])
def test_the_emulation_gives_the_bits_of_the_processor(case: str, tmp_path: object) -> None:
    if best() != "amx":
        pytest.skip("no AMX here")
    tensors = operands(case)
    emulated, real = (product(tensors, tmp_path, form) for form in ("emulated", "real"))
    assert torch.equal(emulated.view(torch.int32), real.view(torch.int32))


def test_the_limit_is_obeyed() -> None:
    needs_emulation()
    for limit in ("avx512", "avx512_bf16", "amx_emulated"):
        assert isa(FUSEDOPS_MAX_ISA=limit) == limit
    assert isa(FUSEDOPS_MAX_ISA="amx") == best()


def test_a_limit_below_what_was_built_says_so() -> None:
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("this machine has no AVX-512 kernels")
    program = "from fusedops._core import extension; print(extension.cpu_library())"
    environment = {**os.environ, "FUSEDOPS_MAX_ISA": "default"}
    run = [sys.executable, "-c", program]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "None" or "FUSEDOPS_MAX_ISA=default" in told
