"""Runs a script and prints how many fused ops it called: ``run_counted.py SCRIPT [ARGS]``."""

from __future__ import annotations

import atexit
import runpy
import sys
from pathlib import Path

import fusedops


def report() -> None:
    print(f"fused calls: {sum(fusedops.counters().values())}", flush=True)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if Path(sys.argv[0]).stem == "timm_vit":  # imports torchvision, of another build of torch
        from coverage_libraries import import_torchvision

        import_torchvision()
    atexit.register(report)
    runpy.run_path(sys.argv[0], run_name="__main__")
