"""Compiles every Triton kernel for GPUs that are not there and keeps what the compiler says of it.

    python tools/kernel_report.py             # writes docs/reports/triton_kernels.csv
    python tools/kernel_report.py --op gelu   # writes and prints the rows of one op
    python tools/kernel_report.py --check     # compares with it (make check-cuda, CI)
    python tools/kernel_report.py --all       # compiles what did not change as well
    python tools/kernel_report.py --versions  # whether the tables of other Tritons are complete

``kernel_cases`` has the configurations of each ``fusedops/kernels/X.py``; each is
compiled for sm_80, sm_90, sm_100 and sm_120, and registers, stack, shared memory and instructions
are read from the machine code with the tools that come with Triton. Fixed rules: no stack, that is
no spilled register; a matrix kernel uses the matrix instructions of its GPU; no tile is computed by
several warps; shared memory fits.

For sm_90 a row tells of the main loop (``kernel_report_code.py``) the loads by width (``4x16`` is
four of 16 bytes), instructions per 16 bytes, bytes that a multiprocessor has under way, products,
and other instructions for each, and which share of an H100's limit that allows by arithmetic
(``kernel_report_estimate.py``), in percent. ``from_l2`` is what products at their full rate ask the
L2 cache for, in bytes a clock of a multiprocessor (it means nothing where products are float32's),
and ``from_shared`` what they ask shared memory for, which gives 128.
``calls`` counts subroutines: 64-bit divisions, mostly. None of it may get worse unseen.

Pointers and sizes are declared divisible by 16, as they are in practice: without that loads are
neither vectorised nor pipelined, and the report would lie. Sizes that a kernel does not specialise
on stay unknown, as in practice.

A row keeps a digest of all that decides its figures: the kernel's source, the device functions and
constants that it uses, types, sizes and launch options, and how this tool compiles and counts.
While digest and Triton's version are the same the figures are, and only what changed is compiled.
``--check`` refuses a digest that is not the present one, and compiles one row in 16 whatever its
digest says (``make kernel-report-all`` all of them).

Figures are of the Triton that is found first. ``make kernel-report-triton TRITON=3.6.0`` puts
another one before the pinned one and writes a table of its own (``--table triton-3.6.0``), of fewer
columns. ``--check`` reads these tables too, without compiling: a row that spills fails, and it says
how many kernels changed after their rows were written or have none; ``--versions`` (second tier)
fails then.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import kernel_report_code
import kernel_report_estimate
import report_table
from kernel_cases import CASES

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (80, 90, 100, 120)
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
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
# Columns of another Triton's table: what the fixed rules read, and what versions are compared by.
OTHER_VERSION_COLUMNS = (
    *("op", "kernel", "case", "arch", "matrix", "registers", "stack", "shared"),
    *("mma", "wgmma", "tcgen05", "others", "repeated", "estimate", "digest"),
)


def ops() -> list[str]:
    """Return the names of the kernel files."""
    paths = (ROOT / "fusedops" / "kernels").glob("[!_]*.py")
    return sorted(path.stem for path in paths)


@functools.cache
def cases(op: str) -> list[dict[str, Any]]:
    """Return the configurations of a kernel file."""
    if op not in CASES:
        raise SystemExit(f"fusedops/kernels/{op}.py has no entry in CASES of tools/kernel_cases")
    return CASES[op]()


def compilations(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return op, index of its configuration and capability of everything that is compiled."""
    return [
        (op, index, capability)
        for op in names
        for index, case in enumerate(cases(op))
        for capability in case.get("capabilities") or CAPABILITIES
    ]


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


def digest(case: dict[str, Any], capability: int) -> str:
    """Return what identifies the figures of a configuration under one version of Triton."""
    # Sorted: some cases collect their names in a set, of another order in every process.
    constexprs = [
        (name, sorted(sources(value).items()) if hasattr(value, "fn") else value)
        for name, value in sorted(case["constexprs"].items())
    ]
    names = ("num_warps", "num_stages", "matrix", "few_rows", "resident")
    launch = ([case.get(name) for name in names], capability)
    types = sorted(case["signature"].items())
    code = sorted(sources(case["kernel"]).items())
    decides = repr((types, constexprs, launch, code, _method()))
    return hashlib.sha256(decides.encode()).hexdigest()[:12]


@functools.cache
def sources(function: Any) -> dict[str, str]:
    """Return the code of a ``@triton.jit`` function and of all of ours that it calls or names.

    Neither comments nor the lines that the functions stand on count.
    """
    found: dict[str, str] = {}

    def visit(function: Any) -> None:
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        if name in found:
            return
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        found[name] = ast.unparse(tree)
        known = function.fn.__globals__
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                value = known.get(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = getattr(known.get(node.value.id), node.attr, None)
            else:
                continue
            if hasattr(value, "fn") and value.fn.__module__.split(".")[0] != "triton":
                visit(value)
            elif type(value).__name__ == "constexpr":
                found[f"{name}: {ast.unparse(node)}"] = repr(value.value)

    visit(function)
    return found


@functools.cache
def _method() -> str:
    parts = (figures, _main_loop, _source, kernel_report_code, kernel_report_estimate)
    return "".join(map(inspect.getsource, parts)) + repr(INSTRUCTIONS)


def report(op: str, index: int, capability: int) -> report_table.Row:
    """Compile one configuration and return its figures."""
    return figures(cases(op)[index], capability)


def figures(case: dict[str, Any], capability: int) -> report_table.Row:
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget

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
        raise RuntimeError(f"cuobjdump told no resources of {case['kernel'].__name__}: {usage}")
    row = {
        "matrix": "few rows" if case["few_rows"] else str(int(case["matrix"])),
        "warps": str(case["num_warps"]),
        "stages": str(case["num_stages"]),
        "registers": resources[1],
        "stack": str(int(resources[2]) + int(resources[4])),
        "shared": str(compiled.metadata.shared),
    }
    row |= {name: str(len(re.findall(text, code))) for name, text in INSTRUCTIONS.items()}
    launch = kernel_report_estimate.Launch(
        capability=capability,
        warps=case["num_warps"],
        stages=case["num_stages"],
        registers=int(resources[1]),
        shared=compiled.metadata.shared,
        resident=case["resident"],
        loaded=kernel_report_code.bytes_per_multiply_add(compiled.asm["ttgir"]),
        copied=kernel_report_code.bytes_per_multiply_add(compiled.asm["ttgir"], copied=True),
    )
    repeated = kernel_report_code.repeated_work(compiled.asm["ttgir"])
    found = _main_loop(kernel_report_code.read(code), repeated, launch)
    return row | (found if capability == 90 else dict.fromkeys(found, ""))


def _main_loop(
    code: kernel_report_code.Code, repeated: float, launch: kernel_report_estimate.Launch
) -> report_table.Row:
    """Return the columns that the machine code's main loop fills."""
    loads = sorted(code.main.loads.items(), reverse=True)
    products = sorted(code.main.products.items())
    share = kernel_report_estimate.share_of_limit(code, launch) / repeated
    return {
        "blocks": str(launch.blocks),
        "loads": " ".join(f"{count}x{width}" for width, count in loads),
        "per_16_bytes": f"{kernel_report_estimate.instructions_per_16_bytes(code):.0f}",
        "in_flight": str(kernel_report_estimate.in_flight(code, launch)),
        "products": " ".join(f"{count}x{shape}" for shape, count in products),
        "others": f"{kernel_report_estimate.others_per_product(code):.1f}",
        "from_l2": f"{kernel_report_estimate.asked_of_l2(launch):.0f}",
        "from_shared": f"{kernel_report_estimate.asked_of_shared(code, launch):.0f}",
        "rest": str(code.rest),
        "calls": str(code.calls),
        "repeated": f"{repeated:g}",
        "estimate": f"{100 * share:.0f}",
    }


def problems(row: report_table.Row) -> list[str]:
    """Return what is wrong with a row by the fixed rules."""
    found = []
    if int(row["stack"]):
        found.append(f"{row['stack']} bytes of stack: registers spill")
    if int(row["shared"]) > SHARED_LIMIT[row["arch"]]:
        found.append(
            f"{row['shared']} bytes of shared memory; the limit is {SHARED_LIMIT[row['arch']]}"
        )
    matrix = row["matrix"] != "0"
    if matrix and not any(int(row[name]) for name in ("mma", "wgmma", "tcgen05")):
        found.append("a matrix kernel without matrix instructions")
    if row["matrix"] == "1" and row["arch"] == "sm_90" and not int(row["wgmma"]):
        found.append("a matrix kernel without warp-group matrix instructions")
    if float(row["repeated"] or 1) > 1:
        found.append(f"its tiles are computed {row['repeated']} times: too many warps for the tile")
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


def other_versions(*, strict: bool) -> int:
    """Say what the committed tables of other Tritons lack; returns the exit code.

    It is 1 for a spill; if ``strict`` also for a kernel without a row of its present sources.
    """
    from fusedops.kernels import _triton_version

    failed, pinned = False, _triton_version.TRITON
    for path in sorted(report_table.REPORTS.glob("triton-*.csv")):
        version = path.stem.removeprefix("triton-")
        major, minor = version.split(".")[:2]
        rows = report_table.rows(path)
        broken = [
            f"{row['op']} {row['kernel']} {row['case']} {row['arch']}: {problem}"
            for row in rows
            for problem in problems(row)
        ]
        # The tables of tiles choose by version.
        _triton_version.TRITON = (int(major), int(minor))
        cases.cache_clear()
        wanted = {digest(cases(op)[index], chip) for op, index, chip in compilations(ops())}
        _triton_version.TRITON = pinned
        cases.cache_clear()
        lacking = len(wanted - {row["digest"] for row in rows})
        where = f"docs/reports/{path.name}"
        for line in broken:
            print(f"{where}: {line}", file=sys.stderr)
        update = f": make kernel-report-triton TRITON={version}" if lacking else ""
        print(f"{where}: {len(wanted) - lacking} of {len(wanted)} kernels are current{update}")
        failed |= bool(broken) or (strict and lacking > 0)
    return int(failed)


def main() -> int:
    """Compile what changed, and write or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--all", action="store_true", help="compile what did not change as well")
    parser.add_argument("--versions", action="store_true", help="only other Tritons' tables")
    parser.add_argument("--op", action="append", metavar="NAME", help="only the rows of this op")
    parser.add_argument("--table", metavar="NAME", default="triton_kernels", help="another table")
    options = parser.parse_args()
    try:
        from triton import __version__
    except ImportError:
        print("triton is not installed: no report of its kernels")
        return 0
    sys.path.insert(0, str(ROOT))
    if options.versions:
        return other_versions(strict=True)
    unknown = sorted(set(options.op or ()) - set(ops()))
    if unknown:
        parser.error(f"--op {', '.join(unknown)}: there is no fusedops/kernels file of this name")
    own = "" if options.table == parser.get_default("table") else f" --table {options.table}"
    table = report_table.Table(
        path=report_table.REPORTS / f"{options.table}.csv",
        command=f"python tools/kernel_report.py{own}",
        compiler=f"triton {__version__}",
        keys=("op", "kernel", "case", "arch"),
        bounded=("registers", "shared", "per_16_bytes", "others", "rest", "calls"),
        not_below=("estimate",),
        problems=problems,
        digest="digest",
    )
    todo = compilations(options.op or ops())
    marks = [digest(cases(op)[index], capability) for op, index, capability in todo]
    known = {} if options.all else report_table.figures(table)
    if options.check:
        # A sixteenth is compiled all the same: a digest that misses something would show there.
        known = {mark: row for mark, row in known.items() if not mark.startswith("0")}
    compiled = {mark: each for mark, each in zip(marks, todo, strict=True) if mark not in known}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(report, *zip(*compiled.values(), strict=True)) if compiled else ()
        known |= dict(zip(compiled, made, strict=True))
    rows = [
        {
            "op": op,
            "kernel": cases(op)[index]["kernel"].__name__,
            "case": case_name(cases(op)[index], cases(op)),
            "arch": f"sm_{capability}",
        }
        | known[mark]
        | {"digest": mark}
        for (op, index, capability), mark in zip(todo, marks, strict=True)
    ]
    if own:
        rows = [{column: row[column] for column in OTHER_VERSION_COLUMNS} for row in rows]
    print(f"compiled {len(compiled)} of {len(set(marks))} different kernels")
    if not options.op:
        others = other_versions(strict=False) if options.check and not own else 0
        return report_table.finish(table, rows, check=options.check) or others
    report_table.show(rows)
    return report_table.finish(
        table, rows, check=options.check, only=lambda row: row["op"] in options.op
    )


if __name__ == "__main__":
    sys.exit(main())
