"""Compiles every Triton kernel for GPUs that are not there and keeps what the compiler says of it.

    python tools/kernel_report.py             # writes docs/reports/triton_kernels.csv
    python tools/kernel_report.py --check     # compares with it (make check-cuda, CI)

Each ``fusedops/kernels/X.py`` names its configurations in ``static_report_cases()``; each is
compiled for sm_80, sm_90 and sm_100, and registers, stack, shared memory and instructions are read
from the machine code with the tools that come with Triton. Fixed rules: no stack, that is no
spilled register; a matrix kernel uses the matrix instructions; shared memory fits.

Pointers and sizes are declared divisible by 16, as they are in practice: without that loads are
neither vectorised nor pipelined, and the report would lie. Sizes that a kernel does not specialise
on stay unknown, as in practice.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import report_table

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
# Instruction of the machine code -> what it tells. tcgen05.mma is UTC<type>MMA in the machine code.
INSTRUCTIONS = {
    "mma": r"\bHMMA",
    "wgmma": r"\bHGMMA",
    "tcgen05": r"\bUTC\w*MMA",
    "tma_loads": r"\bUTMALDG",
    "async_copies": r"\bLDGSTS",
    "loads_16_bytes": r"\bLDG\.E\.(?:\w+\.)*128",
    "loads_global": r"\bLDG\b",
    "stores_16_bytes": r"\bSTG\.E\.(?:\w+\.)*128",
    "stores_global": r"\bSTG\b",
}


def cases() -> list[tuple[str, int]]:
    """Return module name and index of every configuration of every kernel file."""
    sys.path.insert(0, str(ROOT))
    found = []
    for path in sorted((ROOT / "fusedops" / "kernels").glob("[!_]*.py")):
        module = importlib.import_module(f"fusedops.kernels.{path.stem}")
        if not hasattr(module, "static_report_cases"):
            raise SystemExit(f"fusedops/kernels/{path.name} has no static_report_cases()")
        found += [(path.stem, index) for index in range(len(module.static_report_cases()))]
    return found


def is_meant_for(op: str, index: int, capability: int) -> bool:
    """Return whether a configuration is one that GPUs of a capability run: all, unless it says."""
    case = importlib.import_module(f"fusedops.kernels.{op}").static_report_cases()[index]
    return capability in (case.get("capabilities") or CAPABILITIES)


def case_name(case: dict[str, Any], all_cases: list[dict[str, Any]]) -> str:
    """Return the label of a case, and what tells it from others of its kernel and label."""
    alike = [
        {**each["signature"], **each["constexprs"]}
        for each in all_cases
        if (each["kernel"], each["label"]) == (case["kernel"], case["label"])
    ]
    mine = {**case["signature"], **case["constexprs"]}
    differing = [name for name in mine if any(each.get(name) != mine[name] for each in alike)]
    parts = [case["label"], *(f"{name}={mine[name]}" for name in differing)]
    return ", ".join(part for part in parts if part)


def report(op: str, index: int, capability: int) -> report_table.Row:
    """Compile one configuration and return its row."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget

    all_cases = importlib.import_module(f"fusedops.kernels.{op}").static_report_cases()
    case = all_cases[index]
    options = {
        "num_warps": case["num_warps"],
        "num_stages": case["num_stages"],
        "enable_fp_fusion": True,
    }
    compiled = triton_compile(
        _source(case), target=GPUTarget("cuda", capability, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "-res-usage", cubin.name)
        code = _tool("nvdisasm", cubin.name)
    resources = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump told no resources of {op}: {usage}")
    row = {
        "op": op,
        "kernel": case["kernel"].__name__,
        "case": case_name(case, all_cases),
        "arch": f"sm_{capability}",
        "matrix": str(int(case["matrix"])),
        "warps": str(case["num_warps"]),
        "stages": str(case["num_stages"]),
        "registers": resources[1],
        "stack": str(int(resources[2]) + int(resources[4])),
        "shared": str(compiled.metadata.shared),
    }
    return row | {name: str(len(re.findall(text, code))) for name, text in INSTRUCTIONS.items()}


def problems(row: report_table.Row) -> list[str]:
    """Return what is wrong with a row by the fixed rules."""
    found = []
    if int(row["stack"]):
        found.append(f"{row['stack']} bytes of stack: registers spill")
    if int(row["shared"]) > SHARED_LIMIT[row["arch"]]:
        found.append(
            f"{row['shared']} bytes of shared memory; the limit is {SHARED_LIMIT[row['arch']]}"
        )
    if int(row["matrix"]) and not any(int(row[name]) for name in ("mma", "wgmma", "tcgen05")):
        found.append("a matrix kernel without matrix instructions")
    rows = re.search(r"BLOCK_M=(\d+)", row["case"])
    large = rows is None or int(rows[1]) >= 64  # the height of a warp-group instruction
    if int(row["matrix"]) and row["arch"] == "sm_90" and large and not int(row["wgmma"]):
        found.append("a matrix kernel without warp-group matrix instructions")
    return found


def _source(case: dict[str, Any]) -> Any:
    from triton.compiler import ASTSource

    names = case["kernel"].arg_names
    constexprs = case["constexprs"]
    params = case["kernel"].params
    types = {name: "constexpr" if name in constexprs else case["signature"][name] for name in names}
    divisible = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(names)
        if types[name].startswith("*")
        or (types[name] in ("i32", "i64") and not params[position].do_not_specialize)
    }
    return ASTSource(
        fn=case["kernel"],
        signature=types,
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs=divisible,
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run([folder / name, *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr


def main() -> int:
    """Compile everything and write or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    try:
        from triton import __version__
    except ImportError:
        print("triton is not installed: no report of its kernels")
        return 0
    todo = [(*case, each) for case in cases() for each in CAPABILITIES if is_meant_for(*case, each)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = list(pool.map(report, *zip(*todo, strict=True)))
    table = report_table.Table(
        path=report_table.REPORTS / "triton_kernels.csv",
        command="python tools/kernel_report.py",
        compiler=f"triton {__version__}",
        keys=("op", "kernel", "case", "arch"),
        bounded=("registers", "shared"),
        problems=problems,
    )
    return report_table.finish(table, rows, check=check)


if __name__ == "__main__":
    sys.exit(main())
