"""SIGKILL of one of two ranks at random moments: the run goes on from there, to the same bits."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from process_pool import start_process
from torch import distributed as dist
from train_runs import STEPS, config, digest

from fusedops.train import loop, train
from fusedops.train.builder import Run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
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


def losses(folder: Path) -> list[float]:
    return [json.loads(each)["loss"] for each in (folder / "run" / "metrics.jsonl").open()]


@pytest.mark.parametrize("moments", [10, 50])
def test_a_rank_that_is_killed_at_any_moment(tmp_path: Path, moments: int) -> None:
    """Kill runs until so many have not come to their end.

    A run that was killed is gone on with, and killed again, until it is done: what a moment spoils
    is in the weights of the end, and half of the work is saved.
    """
    draw = random.Random(moments)
    lasts, wanted = run(tmp_path / "whole")
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
        assert len(losses(folder)) == STEPS and losses(folder) == losses(tmp_path / "whole"), case
        if killed == moments:
            return
