"""The trap of tile instructions keeps the manual's rules, and the ops on it have equal bits.

The kernels here execute the tile instructions that were built. The library must ask for the
registers late, and say why it has none.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import native
import pytest
import test_tile_registers
import torch
import trapped_tiles

pytestmark = pytest.mark.slow  # `make test-tiles` runs this file, in CI too

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


@pytest.fixture(scope="module", autouse=True)
def needs_trap() -> None:
    """Skip where tile instructions are no illegal ones, or cannot be built."""
    test_tile_registers.needs_emulation()
    if test_tile_registers.best() == "amx":
        pytest.skip("this processor executes tile instructions")
    if not native.knows_tiles():
        pytest.skip("the assembler does not know tile instructions")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


EVERY_PRODUCT = """
import ctypes, sys, torch
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh, run
results = {}
for name in ("linear_act", "linear_glu", "mlp", "baddbmm", "grouped_mm", "moe_mlp",
             "linear_cross_entropy", "attention"):
    spec = all_specs()[name]
    for sample in spec.samples(torch.device("cpu"), torch.bfloat16):
        result = run(spec.op, fresh(sample))
        results[f"{name} {sample.name}"] = [*result.outputs, *result.grads]
torch.save(results, sys.argv[1])
if sys.argv[2] == "trapped":
    print(ctypes.CDLL(None).fusedops_trapped_tiles(b"tdpbf16ps"))
"""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_product_has_the_bits_of_the_emulation(tmp_path: Path) -> None:
    results = {}
    for form in ("emulated", "trapped"):
        path = tmp_path / f"{form}.pt"
        done = subprocess.run(
            [sys.executable, "-c", EVERY_PRODUCT, path, form],
            env=test_tile_registers.environment(form),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        results[form] = torch.load(path)
    assert int(done.stdout) > 1000, "the instructions were not those that ran"
    assert results["emulated"].keys() == results["trapped"].keys()
    for name, emulated in results["emulated"].items():
        for left, right in zip(emulated, results["trapped"][name], strict=True):
            assert torch.equal(bits(left), bits(right)), name


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


def test_the_registers_are_asked_for_by_the_first_product_of_bfloat16() -> None:
    environment = test_tile_registers.environment("trapped")
    subprocess.run([sys.executable, "-c", ASKS_LATE], env=environment, check=True)


REFUSED = """
import torch, fusedops
print(torch.ops.fusedops_native.isa_in_use())
print(torch.ops.fusedops_native.why_no_tiles())
x = torch.ones(40, 32, dtype=torch.bfloat16)
assert torch.equal(fusedops.linear_act(x, x, activation="relu"), 32 * torch.ones(40, 40).bfloat16())
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOSPC, "alternate signal stack that is too small"),
        (errno.EINVAL, "Linux 5.16"),
        (errno.EOPNOTSUPP, "this kernel or its hypervisor does not save them"),
        (errno.EPERM, "a filter of system calls"),
        (None, "tools/trapped_tiles.py"),
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
