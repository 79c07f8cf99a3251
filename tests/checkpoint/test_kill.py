"""SIGKILL at any moment: the last checkpoint loads, and the run ends with the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from checkpoint_runs import Run, train
from process_pool import start_process

STEPS = 10


def run_and_kill(root: Path, after: float | None, *, block: bool) -> tuple[float, str | None]:
    """Train in a process and kill it so many seconds after it began.

    Returns how long it ran, and its digest if it came to the end.
    """
    process, mine = start_process(train, str(root), STEPS, block)
    assert mine.recv() == "begins"
    began = time.monotonic()
    ended = mine.poll(60 if after is None else after)
    process.kill()
    process.join()
    return time.monotonic() - began, mine.recv() if ended else None


def sweep(root: Path, moments: int, seed: int) -> None:
    """Kill runs at random moments; each must have left what leads to the same end."""
    lasts, wanted = run_and_kill(root / "whole", None, block=True)
    assert wanted is not None
    draw = random.Random(seed)
    steps, unfinished = [], 0
    for moment in range(moments):
        folder = root / f"killed-{moment}"
        block = moment % 2 == 0
        _, digest = run_and_kill(folder, draw.uniform(0.0, lasts), block=block)
        assert digest in (None, wanted)
        unfinished += digest is None
        run = Run(folder)
        restored = run.checkpointer.load()
        if restored is not None:
            assert restored.passed_over == ()
            steps.append(restored.step)
        assert Run(folder).train(STEPS) == wanted, f"killed in run {moment} of seed {seed}"
    # The moments fell into training, and into all of it.
    assert unfinished >= moments // 2 and len(set(steps)) >= min(moments, 5) // 2


def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    sweep(tmp_path, moments=3, seed=0)


@pytest.mark.slow
def test_fifty_moments(tmp_path: Path) -> None:
    sweep(tmp_path, moments=50, seed=1)
