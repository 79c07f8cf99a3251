"""``fusedops demo``: starts ``bench/models/train_gpt2.py`` of the source tree."""

from __future__ import annotations

import os
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
        files.check_environment()
        if not script.exists():
            raise files.UserError(
                f"the demo is part of the source tree, and {script} does not exist"
            )
    os.execv(sys.executable, [sys.executable, str(script), *context.args])
