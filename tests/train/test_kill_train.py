"""The command on two processes: SIGKILL of one, SIGTERM of the parent, mistakes, other layouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 40
CONFIG = """
out = "{folder}/run"
steps = 40
batch = 4
device = "cpu"
tune_host = false
model = {{ preset = "tiny-gpt2", dropout = 0.1, attention_dropout = 0.1 }}
data = {{ train = ["{folder}/text.txt"], seq_len = 64 }}
checkpoint = {{ every = 7 }}
log = {{ every = 1, peak_tflops = 1.0 }}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n} is {2 * n}.\n" for n in range(900)))
    path = tmp_path / "train.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def command(file: Path, out: str, *more: str) -> list[str]:
    chosen = ["--processes", "2", "--set", f"out={file.parent}/{out}"]
    return [sys.executable, "-m", "fusedops", "train", str(file), *chosen, *more]


def interrupted(
    file: Path, out: str, action: Callable[[psutil.Process], None], *more: str
) -> tuple[int, str]:
    """Run the command and do something when it has made 15 steps; return code and stderr.

    The second checkpoint, after step 14, waits for the first to be whole.
    """
    started = subprocess.Popen(command(file, out, *more), stderr=subprocess.PIPE, text=True)
    metrics = file.parent / out / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 15):
        assert started.poll() is None
        time.sleep(0.05)
    action(psutil.Process(started.pid))
    _, told = started.communicate()
    return started.returncode, told


def kill_second_rank(parent: psutil.Process) -> None:
    for child in parent.children():
        if child.environ().get("RANK") == "1":
            child.kill()


def state(folder: Path) -> dict[str, Any]:
    """Return all tensors of the last checkpoint."""
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    assert last.name == f"step-{STEPS:010d}.0"
    dcp_to_torch_save(last, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=False)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def losses(folder: Path) -> list[float]:
    return [json.loads(each)["loss"] for each in (folder / "metrics.jsonl").open()]


def test_a_run_that_is_interrupted_ends_with_the_same_bits(file: Path) -> None:
    folder = file.parent
    done = subprocess.run(command(file, "whole"), capture_output=True, text=True)
    assert done.returncode == 0 and f"done: {STEPS} steps" in done.stderr, done.stderr
    wanted = state(folder / "whole")

    code, told = interrupted(file, "killed", kill_second_rank)
    assert code == 1 and "process 1 was killed: SIGKILL" in told and "Traceback" not in told
    done = subprocess.run(command(file, "killed"), capture_output=True, text=True)
    assert done.returncode == 0 and "resumes from step " in done.stderr

    code, told = interrupted(file, "restarted", kill_second_rank, "--restarts", "1")
    assert code == 0 and "resumes from step " in told, told

    code, told = interrupted(file, "stopped", lambda parent: os.kill(parent.pid, signal.SIGTERM))
    assert code == 0 and "stopped at step " in told and "Traceback" not in told, told
    done = subprocess.run(command(file, "stopped"), capture_output=True, text=True)
    assert done.returncode == 0

    for out in ("killed", "restarted", "stopped"):
        assert equal(state(folder / out), wanted), out
        assert losses(folder / out) == losses(folder / "whole"), out


def test_sigterm_before_the_first_step_ends_the_command(file: Path) -> None:
    started = subprocess.Popen(
        command(file, "early", "--restarts", "2"), stderr=subprocess.PIPE, text=True
    )
    while len(psutil.Process(started.pid).children()) < 2:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate()
    assert started.returncode == 0 and "Traceback" not in told, told
    assert "stopped before the first step" in told or "stopped at step 1 " in told
    done = subprocess.run(command(file, "early"), capture_output=True, text=True)
    assert done.returncode == 0 and f"done: {STEPS} steps" in done.stderr


def test_a_mistake_is_one_line_of_two_processes(file: Path) -> None:
    (file.parent / "empty.txt").touch()
    for assignment, message in (
        ("parallel.tp=3", "must be the 2 processes"),
        ("data.train=['nothing']", "the corpus nothing does not exist"),
        ("optimizer.lrr=1", "did you mean 'lr'?"),
        (f"data.train=['{file.parent}/empty.txt']", "the corpus is empty"),
    ):
        more = ("--set", assignment)
        done = subprocess.run(command(file, "bad", *more), capture_output=True, text=True)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("fusedops: error: ") and message in line
