"""SIGKILL of one of two ranks, also at random moments, and SIGTERM: runs end with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import command_runs
import psutil
import pytest
from command_runs import assert_same_end, wait_for_steps, write_config
from run_ranks import on_fresh_ranks
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


def _killed(rank: int, folder: str, kill: tuple[int, float] | None) -> tuple[float, str]:
    """Train with dropout, its states divided; one rank kills itself after so many seconds.

    Returns how long it took, and a digest.
    """
    began, digests = time.monotonic(), []
    plain = loop._loop

    def kept(run: Run, *args: Any) -> Any:  # also where no step is left
        result = plain(run, *args)
        digests.append(digest(run))
        return result

    if kill is not None and kill[0] == rank:
        timer = threading.Timer(kill[1], os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    changes = {"parallel": {"zero": 1}, "checkpoint": {"every": 2}}
    with mock.patch.object(loop, "_loop", kept):
        train(config(Path(folder), **changes))
    return time.monotonic() - began, digests[0]


@pytest.mark.parametrize("moments", [10, 50])
def test_a_rank_that_is_killed_at_any_moment(tmp_path: Path, moments: int) -> None:
    """Kill runs until so many have not come to their end.

    A run that was killed is gone on with, and killed again, until it is done: what a moment spoils
    is in the weights of the end, and half of the work is saved.
    """
    draw = random.Random(moments)
    whole = tmp_path / "whole"
    whole.mkdir()
    results = on_fresh_ranks(2, _killed, str(whole), None)
    lasts, wanted = max(seconds for seconds, _ in results), [each for _, each in results]
    killed = 0
    while killed < moments:
        folder, moments_here, is_done = tmp_path / f"killed-{killed}", [], False
        folder.mkdir()
        while not is_done:
            kill = (draw.randrange(2), draw.uniform(0.0, lasts)) if killed < moments else None
            # The other rank may wait for the one that is dead.
            patience = 300.0 if kill is None else 2 * lasts + 5
            results = on_fresh_ranks(2, _killed, str(folder), kill, patience=patience)
            is_done = all(isinstance(result, tuple) for result in results)
            if not is_done:
                assert kill is not None, results
                killed += 1
                moments_here.append(kill)
        case = f"ranks killed after so many of {lasts:.2f} seconds: {moments_here}"
        assert [each for _, each in results] == wanted, case
        losses, expected = ([line["loss"] for line in lines(each)] for each in (folder, whole))
        assert len(losses) == STEPS and losses == expected, case
