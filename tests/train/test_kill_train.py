"""SIGKILL of one of two ranks, also at random moments, and SIGTERM: runs end with the same bits."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_runs
import psutil
import pytest
from command_runs import assert_same_end, wait_for_steps, write_config
from run_ranks import start_process
from torch import distributed as dist
from train_runs import STEPS, config, digest, lines

from fusedops.train import loop, train
from fusedops.train.builder import Run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
COMMAND_STEPS = 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_config(tmp_path, COMMAND_STEPS)


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
    assert done.returncode == 0 and f"done: {COMMAND_STEPS} steps" in done.stderr, done.stderr
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
        assert_same_end(folder / out, folder / "whole", COMMAND_STEPS)


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
    assert done.returncode == 0 and f"done: {COMMAND_STEPS} steps" in done.stderr


PATIENCE_SECONDS = 300.0
# What a rank gets to notice that the other is dead; then it is killed, as torchrun's agent does.
GRACE_SECONDS = 2.0


def _on_rank(connection: Any, rank: int, store: str, folder: str) -> None:
    """Train with dropout, its states divided; tell when it begins, and a digest at the end."""
    import torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    connection.send("begins")
    plain: Any = loop._loop

    def kept(run: Run, *args: Any) -> Any:
        result = plain(run, *args)
        connection.send(digest(run))
        return result

    loop._loop = kept
    changes = {"parallel": {"zero": 1}, "checkpoint": {"every": 2}}
    train(config(Path(folder), **changes))


def run(folder: Path, kill: tuple[int, float] | None = None) -> tuple[float, list[str]]:
    """Train on two ranks, of which one is killed so many seconds after both have begun.

    Returns how long it took, and what the ranks told at the end, if they came to it.
    """
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    started = []
    for rank in range(2):
        given = (rank, str(folder / "store"), str(folder))
        started.append(start_process(_on_rank, *given))
    for _, mine in started:
        assert mine.recv() == "begins"
    began, patience = time.monotonic(), PATIENCE_SECONDS
    if kill is not None:
        time.sleep(kill[1])
        started[kill[0]][0].kill()
        patience = GRACE_SECONDS
    told = []
    for process, mine in started:
        with contextlib.suppress(EOFError):  # it has died
            told += [mine.recv()] if mine.poll(patience) else []
        lasted = time.monotonic() - began
        process.kill()
        process.join()
    return lasted, told


@pytest.mark.parametrize("moments", [10, 50])
def test_a_rank_that_is_killed_at_any_moment(tmp_path: Path, moments: int) -> None:
    """Kill runs until so many have not come to their end.

    A run that was killed is gone on with, and killed again, until it is done: what a moment spoils
    is in the weights of the end, and half of the work is saved.
    """
    draw = random.Random(moments)
    whole = tmp_path / "whole"
    lasts, wanted = run(whole)
    assert len(wanted) == 2
    killed = 0
    for number in itertools.count():
        folder, told, moments_here = tmp_path / f"killed-{number}", [], []
        while len(told) < 2:
            kill = (draw.randrange(2), draw.uniform(0.0, lasts)) if killed < moments else None
            _, told = run(folder, kill)
            if kill is not None and len(told) < 2:
                killed += 1
                moments_here.append(kill)
            else:
                case = f"ranks killed after so many of {lasts:.2f} seconds: {moments_here}"
                assert told == wanted, case
        losses, expected = ([line["loss"] for line in lines(each)] for each in (folder, whole))
        assert len(losses) == STEPS and losses == expected, case
        if killed == moments:
            return
