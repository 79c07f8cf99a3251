"""Compiles everything under csrc/cuda and keeps what ptxas says of each kernel. Needs no GPU.

    python tools/cuda_report.py             # writes docs/reports/cuda_kernels.csv
    python tools/cuda_report.py --op gelu   # compiles gelu.cu alone, writes and prints its rows
    python tools/cuda_report.py --check     # compares the rows of sm_90 (make check-cuda, CI)
    python tools/cuda_report.py --check --all    # of all GPUs (make kernel-report-all)

Fixed rules: no stack and no spilled register. A row does not say which file its kernel is from,
because several may instantiate one: that a kernel is gone shows when all are compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import native
import report_table

ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def parse(text: str) -> list[report_table.Row]:
    """Return a row per kernel and architecture from the output of ``nvcc -Xptxas=-v``."""
    found = list(ENTRY.finditer(text))
    names = _demangle([match["symbol"] for match in found])
    rows = []
    for match, name in zip(found, names, strict=True):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        rows.append(
            {
                "kernel": name,
                "arch": match["arch"],
                "registers": match["registers"],
                "spill_stores": match["stores"],
                "spill_loads": match["loads"],
                "stack": match["stack"],
                "shared": shared[1] if shared else "0",
            }
        )
    # A kernel that two files instantiate is reported twice, with the same figures.
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def problems(row: report_table.Row) -> list[str]:
    """Return what is wrong with a row by the fixed rules."""
    return [
        f"{row[column]} bytes of {column.replace('_', ' ')}"
        for column in ("spill_stores", "spill_loads", "stack")
        if int(row[column])
    ]


def _demangle(symbols: list[str]) -> list[str]:
    """Return the names of symbols without parameters and namespaces: ``forward<float, 4>``."""
    text = subprocess.run(
        ["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout
    return [
        re.sub(r"\(anonymous namespace\)::|fusedops::|cuda::", "", x) for x in text.splitlines()
    ]


def main() -> int:
    """Compile everything and write or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--all", action="store_true", help="compare the rows of all GPUs")
    parser.add_argument("--op", action="append", metavar="NAME", help="only csrc/cuda/NAME.cu")
    options = parser.parse_args()
    files = sorted(path.stem for path in native.sources("cuda") if path.suffix == ".cu")
    unknown = sorted(set(options.op or ()) - set(files))
    if unknown:
        parser.error(f"--op {', '.join(unknown)}: the files of csrc/cuda are {', '.join(files)}")
    if options.check and not options.all:
        os.environ.setdefault("FUSEDOPS_CUDA_ARCHS", "sm_90")
    try:
        rows = parse(native.check_cuda(only=options.op))
    except native.CannotBuildError as error:
        print(f"CUDA kernels not compiled: {error}")
        return 0
    except native.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    version = subprocess.run(
        [native.cuda_home() / "bin" / "nvcc", "--version"], capture_output=True, text=True
    ).stdout
    release = re.search(r"V(\d+\.\d+\.\d+)", version)
    table = report_table.Table(
        path=report_table.REPORTS / "cuda_kernels.csv",
        command="python tools/cuda_report.py",
        compiler=f"nvcc {release[1] if release else 'of unknown version'}",
        keys=("kernel", "arch"),
        bounded=("registers", "shared"),
        problems=problems,
    )
    if options.op:
        report_table.show(rows)
    elif not os.environ.get("FUSEDOPS_CUDA_ARCHS"):
        return report_table.finish(table, rows, check=options.check)
    architectures, kernels = ({row[key] for row in rows} for key in ("arch", "kernel"))

    def compiled(row: report_table.Row) -> bool:
        return row["arch"] in architectures and (not options.op or row["kernel"] in kernels)

    return report_table.finish(table, rows, check=options.check, only=compiled)


if __name__ == "__main__":
    sys.exit(main())
