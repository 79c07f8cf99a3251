"""A small run of ``fusedops train`` as a command, and the comparison of two that have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CONFIG = """
out = "{folder}/run"
steps = {steps}
batch = 4
device = "cpu"
tune_host = false
model = {{ preset = "tiny-gpt2", dropout = 0.1, attention_dropout = 0.1 }}
data = {{ train = ["{folder}/text.txt"], seq_len = 64 }}
checkpoint = {{ every = 7 }}
log = {{ every = 1, peak_tflops = 1.0 }}
"""


def write_config(folder: Path, steps: int) -> Path:
    """Write a corpus and a configuration, and return the latter's file."""
    (folder / "text.txt").write_text("".join(f"{n} and {n} is {2 * n}.\n" for n in range(900)))
    path = folder / "train.toml"
    path.write_text(CONFIG.format(folder=folder, steps=steps))
    return path


def run_uninterrupted(config: Path, out: str) -> Path:
    """Train on two processes of ``--processes``, and return the run's folder."""
    run = config.parent / out
    words = [sys.executable, "-m", "fusedops", "train", str(config), "--processes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--set", f"out={run}"], check=True, env=environment)
    return run


def num_steps(run: Path) -> int:
    """Return how many steps a run has logged, also while it is running."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def assert_same_end(run: Path, other: Path, steps: int) -> None:
    """Assert that two runs ended with the same weights, moments and losses."""
    assert _equal(_last_state(run, steps), _last_state(other, steps)), run
    assert _losses(run) == _losses(other), run


def _last_state(run: Path, steps: int) -> dict[str, Any]:
    """Return all tensors of the last checkpoint."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{steps:010d}.0"
    dcp_to_torch_save(last, run / "all.pt")
    return torch.load(run / "all.pt", weights_only=False)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
