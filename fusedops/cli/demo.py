"""``fusedops demo``: starts ``bench/models/train_gpt2.py`` of the source tree."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import typer

from fusedops.terminal import files

# Options are the script's own, `--help` too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def demo(context: typer.Context) -> None:
    """Train a small GPT-2, stock and fused, and compare them (`fusedops demo --help`)."""
    script = Path(__file__).resolve().parents[2] / "bench" / "models" / "train_gpt2.py"
    with files.one_line_errors():
        if not script.exists():
            raise files.UserError(
                f"the demo is a part of the source tree, and {script} does not exist: clone the "
                "repository and run `make demo` there"
            )
        make_parser = runpy.run_path(str(script.parent / "gpt2_demo" / "options.py"))["make_parser"]
        make_parser("fusedops demo").parse_args(context.args)  # help and mistakes need no torch
        files.check_environment()
    os.execv(sys.executable, [sys.executable, str(script), *context.args])
