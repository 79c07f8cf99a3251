"""Which folders of ``csrc`` include which: one direction, no circle.

    python tools/lint_includes.py       # exit code 1 and one line for each include

A file may include headers of its own folder and of the folders in lower rows of ``LAYERS``.
import-linter checks the same for Python.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Folders of one row do not include each other.
LAYERS = (
    ("cpu/loss", "cpu/moe", "host", "precompiled"),
    ("cpu/attention", "cpu/product", "cpu/recurrence"),
    ("cpu/gemm", "cpu/norm", "cpu/optimizer"),
    ("cpu/elementwise", "runtime/shared_memory"),
    ("cpu/common", "cuda"),
    (".", "runtime/arena"),
    ("common",),
)
ROWS = {folder: row for row, folders in enumerate(LAYERS) for folder in folders}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")


def errors(root: Path) -> list[str]:
    """A line for each include of ``root`` that ``LAYERS`` does not allow."""
    lines = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        folder = path.parent.relative_to(root).as_posix()
        if folder not in ROWS:
            lines.append(f"{path}: {folder} has no row in tools/lint_includes.py")
            continue
        for header in INCLUDE.findall(path.read_text()):
            if not (path.parent / header).exists():
                continue  # found by an include path: torch, CUDA, generated files
            resolved = os.path.normpath(path.parent / header)
            target = Path(resolved).parent.relative_to(root).as_posix()
            if target != folder and ROWS.get(target, -1) <= ROWS[folder]:
                lines.append(f"{path}: {folder} must not include {header} of {target}")
    return lines


if __name__ == "__main__":
    messages = errors(ROOT / "csrc")
    print("\n".join(messages), end="\n" if messages else "")
    sys.exit(bool(messages))
