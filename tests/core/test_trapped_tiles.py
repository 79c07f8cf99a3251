"""Products on the tiles of AMX have the manual's bits: on a processor with AMX, or on the trap.

The trap (tests/trapped_tiles.py) executes the tile instructions that were built, and keeps the
manual's rules. The library must ask for the registers late, and say why it has none.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import native
import pytest
import torch
import trapped_tiles

from fusedops._core import extension

pytestmark = pytest.mark.slow  # `make test-tiles` runs this file, in CI too

CASES = ("ordinary", "subnormal", "cancelling")
TINY = torch.finfo(torch.float32).tiny

# What is forbidden, and of the sentence that says so.
FORBIDDEN = {
    "unconfigured": "#UD in tilezero: no tiles are configured",
    "released": "#UD in tilezero: no tiles are configured",
    "palette 0": "#UD in tilezero: no tiles are configured",
    "palette": "#GP in ldtilecfg: there is no such palette",
    "reserved": "#GP in ldtilecfg: bytes 2 to 15",
    "reserved bytes": "#GP in ldtilecfg: bytes 32 to 47",
    "reserved rows": "#GP in ldtilecfg: bytes 56 to 63",
    "rows": "#GP in ldtilecfg: rows is more than 16",
    "bytes": "#GP in ldtilecfg: colsb is more than 64",
    "rows without bytes": "#GP in ldtilecfg: one of rows and colsb is 0",
    "left out": "#UD in tilezero: the configuration leaves this tile out",
    "no such tile": "#UD in tilezero: there is no such tile",
    "vvvv": "#UD in tilezero: VEX.vvvv",
    "no SIB": "#UD in tileloadd: the operand must be memory with a SIB byte",
    "same tiles": "#UD in tdpbf16ps: the three tiles must differ",
    "rows of left": "#UD in tdpbf16ps: rows of the sums",
    "depth": "#UD in tdpbf16ps: colsb / 4",
    "columns": "#UD in tdpbf16ps: colsb of the sums",
    "multiple of 4": "#UD in tdpbf16ps: colsb must be a multiple of 4",
    "illegal instruction": "#UD in an instruction",
    "before permission": "",
}


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


def environment() -> dict[str, str]:
    """Return the variables of a process that has tiles; skip where none can run."""
    if best() == "amx":
        return {**os.environ, "FUSEDOPS_MAX_ISA": "amx"}
    if best() != "avx512_bf16":
        pytest.skip("the kernels of AMX need AVX512_BF16")
    if not native.knows_tiles():
        pytest.skip("the assembler does not know tile instructions")
    return trapped_tiles.environment()


@pytest.fixture
def trap() -> dict[str, str]:
    """Return the variables of a process on the trap; skip on a processor with AMX."""
    if best() == "amx":
        pytest.skip("this processor executes tile instructions")
    return environment()


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers with the subnormal ones zero."""
    return torch.where(x.abs() < TINY, torch.zeros_like(x).copysign(x), x)


def by_the_manual(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return what TDPBF16PS is documented to give, 32 elements of k at a time.

    Each step is one multiply-add: exact in float64 for numbers of like size, then rounded.
    """
    sums = torch.zeros(32, 32)
    left, right = flushed(rows.float()).double(), flushed(columns.float()).double()
    for first in range(0, rows.shape[1], 32):
        chains = torch.zeros(2, 32, 32)
        for k in range(first, first + 32):
            exact = chains[k % 2].double() + left[:, k : k + 1] * right[k : k + 1]
            chains[k % 2] = flushed(exact.float())
        sums = flushed(sums + flushed(chains[0] + chains[1]))
    return sums


PRODUCTS = """
import ctypes, sys, torch, fusedops
operands = torch.load(sys.argv[1])
torch.save([fusedops.linear_act(*pair, activation="relu") for pair in operands], sys.argv[1])
trap = ctypes.CDLL(None)
print(trap.fusedops_trapped_tiles(b"tdpbf16ps") if sys.argv[2] == "trapped" else 0)
"""


def operands(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [32, 96] and weight [32, 96]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 96, generator=generator)
    weight = torch.randn(32, 96, generator=generator)
    if case == "subnormal":
        x, weight = x * 1e-19, weight * 1e-19
        x[::3] *= 1e-20
    if case == "cancelling":
        x[:, 1::2], weight[:, 1::2] = x[:, ::2], -weight[:, ::2] * (1 + 2**-7)
    return x.bfloat16(), weight.bfloat16()


def test_products_have_the_bits_of_the_manual(tmp_path: Path) -> None:
    path, form = tmp_path / "operands.pt", "real" if best() == "amx" else "trapped"
    torch.save([operands(case) for case in CASES], path)
    run = [sys.executable, "-c", PRODUCTS, path, form]
    done = subprocess.run(run, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    assert form == "real" or int(done.stdout) > 0, "the instructions were not those that ran"
    for case, result in zip(CASES, torch.load(path), strict=True):
        x, weight = operands(case)
        expected = by_the_manual(x, weight.t()).relu().bfloat16()
        assert torch.equal(result, expected), case


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
    subprocess.run([sys.executable, "-c", EVERYWHERE], env=environment(), check=True)


def test_the_limit_is_obeyed() -> None:
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("this machine has no AVX-512 kernels with bfloat16")
    assert isa(FUSEDOPS_MAX_ISA="avx512") == "avx512"


def test_a_limit_below_what_was_built_says_so() -> None:
    if best() not in ("avx512_bf16", "amx"):
        pytest.skip("this machine has no AVX-512 kernels")
    program = "from fusedops._core import extension; print(extension.cpu_library())"
    environment = {**os.environ, "FUSEDOPS_MAX_ISA": "default"}
    run = [sys.executable, "-c", program]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "None" or "FUSEDOPS_MAX_ISA=default" in told


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if best() == "amx":
        pytest.skip("this processor executes tile instructions")
    environment()  # which skips where there is no trap
    path = tmp_path_factory.mktemp("faults") / "tile_faults"
    source = Path(__file__).with_name("tile_faults.cpp")
    trap = trapped_tiles.library()
    command = [native.compiler(), "-std=c++20", "-O1", "-mfma", source, trap, "-o", path]
    subprocess.run(command, check=True)
    return path


def test_the_trap_configures_as_the_manual_says(program: Path) -> None:
    done = subprocess.run([program, "configurations"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_trap_faults_where_the_manual_says(program: Path) -> None:
    for use, rule in FORBIDDEN.items():
        done = subprocess.run([program, use], capture_output=True, text=True)
        number = signal.SIGSEGV if rule.startswith("#GP") else signal.SIGILL
        assert done.returncode == -number, use
        assert rule in done.stderr, use


ASKS_LATE = """
import re, torch, fusedops
def asked():
    caught = re.search(r"SigCgt:\\t(\\w+)", open("/proc/self/status").read())[1]
    return bool(int(caught, 16) >> 3 & 1)  # SIGILL: the trap that stands for the permission
def multiply(dtype):
    fusedops.linear_act(torch.ones(40, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype))
fusedops.gelu(torch.ones(64).bfloat16())
multiply(torch.float32)
multiply(torch.float16)
assert not asked(), "nothing has multiplied bfloat16 yet"
multiply(torch.bfloat16)
assert asked()
"""


def test_the_registers_are_asked_for_by_the_first_product_of_bfloat16(
    trap: dict[str, str],
) -> None:
    subprocess.run([sys.executable, "-c", ASKS_LATE], env=trap, check=True)


REFUSED = """
import torch, fusedops
print(torch.ops.fusedops_native.isa_in_use())
print(torch.ops.fusedops_native.why_no_tiles())
x = torch.ones(40, 32, dtype=torch.bfloat16)
assert torch.equal(fusedops.linear_act(x, x, activation="relu"), 32 * torch.ones(40, 40).bfloat16())
"""


@pytest.mark.usefixtures("trap")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOSPC, "alternate signal stack that is too small"),
        (errno.EINVAL, "Linux 5.16"),
        (errno.EOPNOTSUPP, "this kernel or its hypervisor does not save them"),
        (errno.EPERM, "a filter of system calls"),
        (None, "tests/trapped_tiles.py"),
    ],
)
def test_a_refusal_of_the_registers_has_a_reason(
    tmp_path: Path, error: int | None, reason: str
) -> None:
    environment = {**os.environ, "FUSEDOPS_MAX_ISA": "amx_trapped"}
    if error is not None:
        source, library = tmp_path / "refuse.cpp", tmp_path / "librefuse.so"
        source.write_text(f'extern "C" int fusedops_trap_tiles() {{ return {error}; }}\n')
        command = [native.compiler(), "-shared", "-fPIC", source, "-o", library]
        subprocess.run(command, check=True)
        environment["LD_PRELOAD"] = str(library)
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, check=True
    )
    isa, missing = done.stdout.splitlines()
    assert isa == "avx512_bf16"
    assert reason in missing
    assert error is None or os.strerror(error) in missing
