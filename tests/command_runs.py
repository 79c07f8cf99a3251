"""A small run of ``fusedops train`` as a command, and the comparison of two that have ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from comparing import assert_same_bits
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 300.0
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


def write_config(folder: Path, steps: int, more: str = "") -> Path:
    """Write a corpus and a configuration, and return the latter's file."""
    (folder / "text.txt").write_text("".join(f"{n} and {n} is {2 * n}.\n" for n in range(900)))
    path = folder / "train.toml"
    path.write_text(CONFIG.format(folder=folder, steps=steps) + more)
    return path


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a command that uses this checkout."""
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def install(folder: Path, name: str, module: str) -> str:
    """Write a command that runs a module with this Python; return the ``PATH`` that has it."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    program.chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


def command(config: Path, *more: str) -> list[str]:
    """Return the command that trains on two processes of ``--processes``."""
    return [sys.executable, "-m", "fusedops", "train", str(config), "--processes", "2", *more]


def run_uninterrupted(config: Path, out: str) -> Path:
    """Train on two processes of ``--processes``, and return the run's folder."""
    run = config.parent / out
    subprocess.run(command(config, "--set", f"out={run}"), check=True, env=environment())
    return run


def num_steps(run: Path) -> int:
    """Return how many steps a run has logged, also while it is running."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_steps(run: Path, count: int, *started: subprocess.Popen[str]) -> None:
    """Wait until a run has logged so many steps, while processes are running."""
    end = time.monotonic() + PATIENCE_SECONDS
    while num_steps(run) < count:
        assert time.monotonic() < end
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)


def ended(*started: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    """Return the exit codes of processes, which must not hang, and what each wrote to stderr."""
    try:
        texts = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], texts


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def assert_same_end(run: Path, other: Path, steps: int) -> None:
    """Assert that two runs ended with the same weights, moments and losses."""
    assert_same_bits(_last_state(run, steps), _last_state(other, steps), str(run))
    assert _losses(run) == _losses(other), run


def _last_state(run: Path, steps: int) -> dict[str, Any]:
    """Return all tensors of the last checkpoint."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{steps:010d}.0"
    dcp_to_torch_save(last, run / "all.pt")
    return torch.load(run / "all.pt", weights_only=False)


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
