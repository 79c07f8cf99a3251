"""The guard: what it takes for a bad step, what it does, and that it says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Run, on_ranks, steps_in

from fusedops.checkpoint import Guard, GuardDecision, GuardError

NAN, INF = float("nan"), float("inf")


def used_to(guard: Guard, loss: float = 2.0, norm: float = 1.0, steps: int = 16) -> Guard:
    """Show a guard so many steps that are like each other."""
    for step in range(steps):
        wave = 1 + 0.02 * (step % 3 - 1)  # the median is 1, the deviation the least
        assert guard.check(step, loss * wave, norm * wave).ok
    return guard


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_what_is_not_finite_is_skipped_from_the_first_step_on(name: str, bad: float) -> None:
    guard = Guard()
    values = (bad, 1.0) if name == "loss" else (1.0, bad)
    assert guard.check(0, *values) == GuardDecision(0, "skip", f"the {name} is {bad}")
    assert guard.check(1, torch.tensor(values[0]), torch.tensor(values[1])).action == "skip"
    assert guard.check(2, 1.0, 1.0).ok and len(guard.events) == 2


def test_a_spike_is_seen_and_told(caplog: pytest.LogCaptureFixture) -> None:
    guard = used_to(Guard())
    with caplog.at_level(logging.WARNING):
        verdict = guard.check(16, 4.0, 1.0)
    assert verdict.action == "skip"
    assert verdict.reason == "the loss is 4, 20.0 deviations above 2"
    assert f"step 16: {verdict.reason}: skipped" in caplog.text
    assert guard.check(17, 2.0, 30.0).reason.startswith("the gradient norm is 30, ")
    assert guard.report().splitlines()[0] == f"step 16: skip: {verdict.reason}"
    # What was bad is not what is usual from then on.
    assert guard.check(18, 4.0, 1.0).action == "skip" and guard.check(19, 2.0, 1.0).ok


def test_what_falls_or_drifts_is_no_spike() -> None:
    guard = used_to(Guard())
    assert guard.check(16, 0.1, 0.01).ok
    guard = Guard()
    for step in range(200):
        assert guard.check(step, 10 * 0.99**step, 1.0 + 0.01 * step).ok
    assert guard.report() == "nothing unusual"


def test_noise_widens_what_is_usual() -> None:
    draw = torch.Generator().manual_seed(0)
    guard = Guard()
    norms = torch.randn(300, generator=draw).exp().clamp(max=6.0).tolist()
    verdicts = [guard.check(step, 1.0, norm) for step, norm in enumerate(norms)]
    assert sum(not verdict.ok for verdict in verdicts) <= 3


def test_a_few_values_are_no_history() -> None:
    guard = used_to(Guard(), steps=7)
    assert guard.check(7, 1000.0, 1.0).ok


@pytest.mark.parametrize("action", ["stop", "go"])
def test_actions_can_be_chosen(action: str) -> None:
    guard = used_to(Guard(on_spike=action))
    if action == "stop":
        with pytest.raises(GuardError, match="step 16: the loss is 40"):
            guard.check(16, 40.0, 1.0)
    else:
        assert guard.check(16, 40.0, 1.0).ok
    assert guard.events[-1].action == action


def test_patience_ends(tmp_path: Path) -> None:
    guard = used_to(Guard(patience=3))
    for step in range(16, 19):
        assert guard.check(step, NAN).action == "skip"
    with pytest.raises(GuardError, match="the loss is nan; 4 bad steps in a row") as error:
        guard.check(19, NAN)
    assert "step 17: skip: the loss is nan" in str(error.value)


def test_a_guard_that_is_saved_too_remembers_what_was_bad_over_a_rollback(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.guard = Guard(run.checkpointer, on_nonfinite="rollback")
    run.checkpointer.add(guard=run.guard)
    run.train(3)
    assert run.guard.check(3, NAN).action == "rollback"
    assert "step 3: rollback to step 2: the loss is nan" in run.guard.report()
    assert run.guard.check(3, NAN).action == "skip"
    run.checkpointer.save(4, data={"position": 32})
    again = Run(tmp_path)
    again.guard = Guard(again.checkpointer, on_nonfinite="rollback")
    again.checkpointer.add(guard=again.guard)
    assert again.checkpointer.load() is not None
    assert again.guard.state_dict() == run.guard.state_dict()
    assert again.guard.check(3, NAN).action == "skip"


def test_rollbacks_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    guard = Guard(run.checkpointer, on_nonfinite="rollback", max_rollbacks=1)
    assert guard.check(5, NAN).action == "rollback"
    with pytest.raises(GuardError, match="went back to step 1 1 times already"):
        guard.check(6, NAN)
    empty = Guard(Run(tmp_path / "none").checkpointer, on_nonfinite="rollback")
    with pytest.raises(GuardError, match="there is no checkpoint to go back to"):
        empty.check(0, NAN)


def _spoil(run: Run) -> None:
    with torch.no_grad():
        run.model.first.weight.fill_(NAN)


@pytest.mark.parametrize("block", [True, False])
def test_a_rollback_goes_back_before_the_weights_were_spoilt(tmp_path: Path, block: bool) -> None:
    run = Run(tmp_path, keep=1)
    run.guard = Guard(run.checkpointer, patience=2)
    run.checkpointer.add(guard=run.guard)
    for step in range(1, 5):
        run.step(step)
        run.checkpointer.save(step, block=block)
    run.checkpointer.wait()
    assert steps_in(tmp_path) == [4, 3]  # no step has shown yet what the last is worth
    weights = run.model.first.weight.clone()
    assert run.guard.check(5, 2.0).ok
    assert steps_in(tmp_path) == [4]
    _spoil(run)
    for step in (5, 6):
        run.checkpointer.save(step, block=block)
        assert run.guard.check(step, NAN).action == "skip"
    run.checkpointer.wait()
    assert steps_in(tmp_path) == [6, 4]
    verdict = run.guard.check(7, NAN)
    assert verdict.restored is not None and verdict.restored.step == 4
    assert torch.equal(run.model.first.weight, weights)
    # What was saved later must not be what the next run begins with.
    assert steps_in(tmp_path) == [4]


def test_a_run_that_goes_on_from_spoilt_weights_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _spoil(run)
    for step in range(1, 4):
        run.checkpointer.save(step)
    run.checkpointer.close()
    again = Run(tmp_path)
    again.checkpointer.load()
    guard, step = Guard(again.checkpointer, patience=2, max_rollbacks=2), 3
    with pytest.raises(GuardError, match="went back to step 3 2 times already"):
        for _ in range(20):
            restored = guard.check(step, NAN).restored
            step = restored.step if restored else step + 1
            again.checkpointer.save(step)


def test_a_resumed_guard_judges_as_one_that_never_stopped() -> None:
    first = used_to(Guard())
    first.check(16, NAN)
    second = Guard()
    second.load_state_dict(first.state_dict())
    for guard in (first, second):
        assert guard.check(17, 4.0).reason == "the loss is 4, 20.0 deviations above 2"
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_spike": "skp"}, "did you mean 'skip'?"),
        ({"on_nonfinite": "go"}, "on_nonfinite must be one of 'skip', 'rollback', 'stop'"),
        ({"on_spike": "rollback"}, "checkpointer must be given where something is rolled back"),
        ({"spike": -1.0}, "spike must be positive"),
        ({"window": 2}, "window must be at least 8, got 2"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        Guard(**arguments)
    assert says in str(error.value)


def test_a_value_must_be_one_number() -> None:
    with pytest.raises(ValueError, match=r"loss must be one number, got a tensor of shape \[2\]"):
        Guard().check(0, torch.ones(2))


def _check_on_rank(rank: int) -> list[str]:
    guard = used_to(Guard())
    first = guard.check(16, NAN if rank == 1 else 2.0)
    second = guard.check(17, 2.0 + 2 * rank, 1.0)
    third = guard.check(18, 2.0 + 0.01 * rank, 1.0)
    return [first.reason, second.reason, third.action]


@pytest.mark.distributed
def test_ranks_do_the_same() -> None:
    wanted = ["the loss is nan", "the loss is 4, 20.0 deviations above 2", "go"]
    assert on_ranks(2, _check_on_rank) == [wanted, wanted]
