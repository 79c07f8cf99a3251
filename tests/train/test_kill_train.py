"""The command on two processes: SIGKILL of one, SIGTERM of the parent, mistakes, other layouts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import command_runs
import psutil
import pytest
from command_runs import assert_same_end, wait_for_steps, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_config(tmp_path, STEPS)


def command(file: Path, out: str, *more: str) -> list[str]:
    return command_runs.command(file, "--set", f"out={file.parent}/{out}", *more)


def interrupted(
    file: Path, out: str, action: Callable[[psutil.Process], None], *more: str
) -> tuple[int, str]:
    """Run the command and do something when it has made 15 steps; return code and stderr.

    The second checkpoint, after step 14, waits for the first to be whole.
    """
    started = subprocess.Popen(command(file, out, *more), stderr=subprocess.PIPE, text=True)
    wait_for_steps(file.parent / out, 15, started)
    action(psutil.Process(started.pid))
    _, told = started.communicate()
    return started.returncode, told


def kill_second_rank(parent: psutil.Process) -> None:
    for child in parent.children():
        if child.environ().get("RANK") == "1":
            child.kill()


def test_a_run_that_is_interrupted_ends_with_the_same_bits(file: Path) -> None:
    folder = file.parent
    done = subprocess.run(command(file, "whole"), capture_output=True, text=True)
    assert done.returncode == 0 and f"done: {STEPS} steps" in done.stderr, done.stderr
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

    code, report = interrupted(
        file, "requeued", lambda parent: os.kill(parent.pid, signal.SIGUSR1), "--stop-code", "75"
    )
    assert code == 75 and "stopped at step " in report and "Traceback" not in report, report
    done = subprocess.run(command(file, "requeued", "--stop-code", "75"), capture_output=True)
    assert done.returncode == 0

    for out in ("killed", "restarted", "stopped", "requeued"):
        assert_same_end(folder / out, folder / "whole", STEPS)


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
