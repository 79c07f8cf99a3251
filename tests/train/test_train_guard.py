"""What is not finite: the last good checkpoint stays, a run ends with it, and ranks agree.

The host waits for the numbers of the device once in a step.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from one_process import full_tensor
from run_ranks import on_fresh_ranks
from torch.overrides import TorchFunctionMode
from train_runs import Watching, around_backward, config, lines, resumed

from fusedops._core import dtypes
from fusedops.checkpoint import GuardError
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.train import InputError, step, train
from fusedops.train.builder import Run

SPOILT_STEP = 3
STEPS = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel": {"dp": 2}},
    # Whether a step overflowed is decided before the guard sees it.
    "dp2-float16": {"parallel": {"dp": 2}, "precision": {"compute": "float16"}},
    "dp2-zero3": {"parallel": {"dp": 2, "zero": 3}},
    "dp2-offload": {"parallel": {"dp": 2, "offload": ["optimizer"]}},
    "tp2": {"parallel": {"tp": 2}},
    "pp2": {"parallel": {"pp": 2, "microbatches": 2}},
}


def test_a_run_that_ended_in_nan_resumes_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    given = config(tmp_path, checkpoint={"every": 1, "keep": 3}, guard={"patience": 3})
    train(given, ["steps=4"])
    good = "step-0000000004.0"
    for _ in range(2):  # the same command does the same
        with pytest.raises(GuardError, match=f"after step 7 .*; the last good .*/{good}"):
            train(given, ["steps=7", "optimizer.lr=1e99"])
        names = [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
        assert names == [good, *(f"step-{step:010d}.0" for step in (5, 6, 7))]
    again = resumed(given, "steps=7")
    assert again.first == 4
    assert all(math.isfinite(record["loss"]) for record in again.records)
    passed_over = "passed over step-0000000007.0: it is not finite"
    assert again.run.notes[:2] == ("resumes from step 4", passed_over)


def test_a_run_without_a_good_checkpoint_does_not_resume(tmp_path: Path) -> None:
    given = config(tmp_path, checkpoint={"every": 3}, optimizer={"lr": 1e99})
    with pytest.raises(GuardError, match="no checkpoint is good; .*start a new run"):
        train(given, ["steps=6"])
    with pytest.raises(InputError, match="no checkpoint in .* that are finite; start a new run"):
        train(given, ["steps=6"])


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("bad", [1, 2])
def test_a_run_whose_last_steps_were_skipped_is_not_done(
    tmp_path: Path, compute: str, bad: int
) -> None:
    def spoil(run: Run) -> None:
        if run.step >= STEPS - bad:
            next(run.parallel.model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]

    export = tmp_path / "export"
    given = config(tmp_path, steps=STEPS, checkpoint={"every": 2}, export=str(export))
    given |= {"precision": {"compute": compute}, "model": {"preset": "tiny-gpt2"}}
    with around_backward(after=spoil):
        if bad == 1:
            assert train(given).finished and list(export.iterdir())
            return
        # Also where the steps are of two starts.
        stopping = Watching(STEPS - bad, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(given, callback=stopping).step == STEPS - 1
        for _ in range(2):  # the same command does not find it done
            with pytest.raises(GuardError, match="after step 5 with 2 skipped steps, .*0000002.0"):
                train(given)
    assert not list(export.iterdir())
    assert resumed(given).first == 2


def test_steps_that_are_never_good_end_the_run(tmp_path: Path) -> None:
    given = config(tmp_path, checkpoint={"every": 1, "keep": 3}, guard={"patience": 2})
    train(given, ["steps=4"])
    with pytest.raises(GuardError, match="went back to step 4 2 times already; the last good"):
        train(given, ["steps=100", "optimizer.lr=1e99"])
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps == [*range(1, len(steps) + 1)], "a rollback removes the lines of later steps"


def _spoiling(rank: int, folder: str, changes: dict[str, Any], rank_of_nan: int) -> Any:
    """Train while gradients of one rank become NaN after the backward of a step."""

    def spoil(run: Run) -> None:
        if rank == rank_of_nan and run.step + 1 == SPOILT_STEP:
            # The last one: words that two stages share are in the norm of the first alone.
            grad: Any = list(run.parallel.model.parameters())[-1].grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0] = torch.nan

    watching = Watching()
    given = config(Path(folder), out=f"{folder}/{len(changes)}-{rank_of_nan}", **changes)
    # A large eps: AdamW does not make roundings of tiny gradients as large as its steps.
    more = ["model.dropout=0.0", "model.attention_dropout=0.0", "optimizer.eps=1e-3"]
    with around_backward(after=spoil) as runs:
        train(given, more, callback=watching)
    run = runs[0]
    events = [(event.step, event.action) for event in run.guard.events]
    return events, run.scale.value, _weights(run.parallel), [dict(e) for e in watching.records]


def _weights(parallel: TrainEngine) -> dict[str, Any]:
    return {name: full_tensor(each).numpy() for name, each in parallel.model.named_parameters()}


@functools.cache
def _alone(microbatches: int, compute: str) -> Any:
    """Train on one process."""
    changes = {"steps": STEPS, "parallel": {"microbatches": microbatches}}
    changes |= {"precision": {"compute": compute}}
    with tempfile.TemporaryDirectory() as folder:
        return _spoiling(0, folder, changes, 0)


@pytest.mark.ci(every=3)
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_gradient_of_one_rank_skips_the_step_on_all(layout: str, tmp_path: Path) -> None:
    changes = LAYOUTS[layout] | {"steps": STEPS}
    half = "precision" in changes
    microbatches = changes["parallel"].get("microbatches", 1)
    events, scale, wanted, records = _alone(microbatches, "float16" if half else "auto")
    assert events == ([] if half else [(SPOILT_STEP, "skip")])
    results = on_fresh_ranks(2, _spoiling, str(tmp_path), changes, 1)
    assert all(isinstance(result, tuple) for result in results), results
    difference = dtypes.training_difference(STEPS)
    seen = set()
    for found, found_scale, weights, _ in results:
        assert found == events and found_scale == scale
        for name, value in weights.items():
            assert torch.from_numpy(value).isfinite().all(), name
            seen.add(name)
            if not half:
                assert abs(value - wanted[name]).max() <= difference, name
    assert seen == wanted.keys()
    for key in ("loss", "action"):
        one, other = ([each[key] for each in run] for run in (results[0][3], records))
        assert one == (other if key == "action" else pytest.approx(other, rel=difference)), key


WAITING = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.nonzero, torch.nonzero),
}


class Waits(TorchFunctionMode):
    """Counts calls that give numbers of a tensor to the host, by the line of ``step.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller: FrameType | None = sys._getframe(1)
        if func in WAITING and caller is not None and caller.f_code.co_filename == step.__file__:
            self.lines[caller.f_lineno] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_waits_once(tmp_path: Path) -> None:
    changes = {"parallel": {"microbatches": 2}, "validation": {"sequences": 0}}
    with Waits() as waits:
        result = train(config(tmp_path, steps=3, **changes))
    assert result.finished and list(waits.lines.values()) == [3]
