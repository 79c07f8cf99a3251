"""StepMemory records a step of a loop as ``report`` does one of its own, and changes no value."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import assert_same_bits
from small_models import gpt2, language_loss, tokens
from torch import nn

from fusedops import memory
from fusedops.memory import StepMemory
from fusedops.models import Transformer, preset
from fusedops.optim import AdamW
from fusedops.train import train
from tests.train.train_runs import Watching, config

ROWS, WIDTH = 32, 64


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh()) * 3)


def loss(model: nn.Module, part: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(part))
    result: torch.Tensor = model(x).square().mean()
    return result


def recorded(model: nn.Module, step: Callable[[], None]) -> memory.MemoryReport:
    """Return the report of a step that was made once before."""
    watched = StepMemory(model, AdamW(model.parameters()))
    with watched.prepare():
        step()
    model.zero_grad(set_to_none=True)
    with watched.record():
        step()
    assert watched.report is not None
    return watched.report


def micro_batches(model: nn.Module, parts: int, *, together: bool) -> memory.MemoryReport:
    """Return the report of a step whose micro-batches run one after another, or as in GPipe."""

    def step() -> None:
        if together:
            torch.autograd.backward([loss(model, part) for part in range(parts)])
            return
        for part in range(parts):
            loss(model, part).backward()

    return recorded(model, step)


def test_a_step_of_a_loop_holds_what_the_report_says() -> None:
    model = gpt2()
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = memory.report(model, inputs, optimizer=AdamW(model.parameters()))
    found = recorded(model, lambda: model(**inputs).loss.backward())
    for name in ("named", "layers", "weights", "states", "gradients", "phase"):
        assert getattr(found, name) == getattr(expected, name), name


def test_micro_batches_that_are_alive_together_hold_as_many_activations() -> None:
    one, four = (micro_batches(layers(), parts, together=True) for parts in (1, 4))
    # The outputs of tanh, which its backward and the next linear layer share, and the mean.
    assert one.activations >= 3 * ROWS * WIDTH * 4
    assert four.activations == pytest.approx(4 * one.activations, rel=0.02)


def test_micro_batches_one_after_another_hold_those_of_one() -> None:
    model = layers()
    one, four = (micro_batches(model, parts, together=False) for parts in (1, 4))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert one.gradients == four.gradients == weights
    # The gradients of the micro-batch before are there when the next backward begins.
    assert four.activations == pytest.approx(one.activations + weights, rel=0.02)
    assert sum(kinds.get("gradient", 0) for kinds in four.layers.values()) == weights
    assert {name for name in four.layers if name} <= {str(number) for number in range(6)}


def test_a_recomputed_layer_is_seen_in_the_backward() -> None:
    model = Transformer(preset("tiny-llama"))
    ids = torch.randint(0, model.config.vocab_size, (2, 64))

    def step() -> None:
        model(ids).float().square().mean().backward()

    plain = recorded(model, step)
    memory.apply(model, memory.Policy(memory.recompute("layers.*")))
    found = recorded(model, step)
    assert found.activations < 0.7 * plain.activations
    assert found.phase == "backward"


def test_the_recorded_step_has_the_same_bits() -> None:
    grads = []
    for record in (False, True):
        torch.manual_seed(0)
        model = gpt2()
        watched = StepMemory(model)
        with watched.prepare() if record else contextlib.nullcontext():
            language_loss(model).backward()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)  # of dropout
        with watched.record() if record else contextlib.nullcontext():
            language_loss(model).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_bits(*grads)


def test_a_run_writes_its_step(tmp_path: Path) -> None:
    runs = []
    for name, log in (("without", {}), ("with", {"memory_step": 3})):
        watching = Watching()
        folder = tmp_path / name
        folder.mkdir()
        train(config(folder, steps=4, log={"peak_tflops": 1.0} | log), callback=watching)
        runs.append([record["loss"] for record in watching.records])
    assert runs[0] == runs[1]
    run = tmp_path / "with" / "run"
    record = json.loads((run / "profile" / "memory-0.json").read_text())
    assert record["step"] == 3 and record["rank"] == 0
    total = sum(sum(sizes.values()) for sizes in record["layers"].values())
    assert total == pytest.approx(record["named"])
    assert any(name.startswith("layers.") for name in record["layers"])
    assert not list((tmp_path / "without" / "run").rglob("memory-*.json"))


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="StepMemory"):
        StepMemory("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer"):
        StepMemory(nn.Linear(2, 2), optimizer=3)  # type: ignore[arg-type]
