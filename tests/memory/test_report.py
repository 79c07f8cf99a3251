"""The report names the tensors of the peak; fit finds a policy for a budget, or says none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import (
    encoder,
    gpt2,
    language_loss,
    peak,
    results,
    tokens,
)
from torch import nn

from fusedops import memory
from fusedops.memory import StepMemory
from fusedops.memory.apply import policy_state_of
from fusedops.memory.layers import lists_of
from fusedops.models import Transformer, preset
from fusedops.optim import AdamW
from fusedops.train import train
from tests.train.train_runs import Watching, config


def _batch() -> dict[str, torch.Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def test_a_report_counts_what_is_there() -> None:
    model = gpt2()
    gradients = results(model, language_loss)
    state = torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    found = memory.report(model, _batch(), optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.grad, gradients[name])
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert found.gradients == weights
    assert found.states == 2 * weights
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert found.weights == weights + buffers
    assert abs(found.dynamic - peak(model, language_loss)) <= 0.05 * found.dynamic
    assert 0.85 * found.dynamic <= found.named <= found.dynamic
    assert found.named == sum(tensor.nbytes for tensor in found.tensors)


def test_a_report_knows_our_ops_saved_tensors_by_layer() -> None:
    model = gpt2()
    found = memory.report(model, _batch())
    kept = {(tensor.layer, tensor.op, tensor.output): tensor for tensor in found.tensors}
    for layer in range(4):
        each = kept[f"transformer.h.{layer}", "fusedops::mlp", "preactivation"]
        assert each.kind == "activation" and each.nbytes == 4 * 64 * 256 * 4 and each.count == 1
    text = str(found)
    assert "fusedops::mlp.preactivation" in text and "transformer.h.3" in text
    assert found.svg().startswith("<svg") and "transformer.h.2" in found.svg()


def test_a_report_of_a_recomputed_model_has_no_activations_of_its_layers() -> None:
    model = gpt2()
    usual = memory.report(model, _batch())
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))
    found = memory.report(model, _batch())
    assert found.peak < 0.75 * usual.peak
    for layer in range(3):
        assert found.layers.get(f"transformer.h.{layer}", {}).get("activation", 0) <= 2 * 65536
    assert policy_state_of(model) is not None


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "plain"])
def test_a_report_under_autocast_is_of_a_step_of_training(patched: bool, recomputed: bool) -> None:
    """Autocast's copies of weights live from the forward to the backward, and are new each step."""
    model = gpt2(patched=patched, layers=3, hidden=128)
    if recomputed:
        memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_loss(model)

    expected = results(model, loss)
    trained = peak(model, loss)
    with torch.autocast("cpu", torch.bfloat16):
        found = memory.report(model, _batch())
        assert torch.is_autocast_enabled("cpu")
        linear = model.transformer.h[0].attn.c_proj
        assert linear(torch.ones(2, 128)).dtype == torch.bfloat16
    assert found.dynamic == pytest.approx(trained, rel=0.01)
    casts = sum(tensor.nbytes for tensor in found.tensors if tensor.kind == "cast")
    matrices = sum(2 * p.numel() for p in model.transformer.h.parameters() if p.dim() > 1)
    if recomputed:  # of the layer that runs at the peak, if one does
        assert casts <= matrices / 2
    else:
        assert casts >= 0.9 * matrices and "weights in autocast's dtype" in str(found)
    assert_same_bits(results(model, loss), expected)


def test_states_are_counted_where_the_model_is() -> None:
    model = gpt2(layers=2).bfloat16()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    masters = AdamW(model.parameters(), master_weights=True)
    assert memory.report(model, _batch(), optimizer=masters).states == 12 * numbers
    small = AdamW(model.parameters(), state_dtype=torch.bfloat16)
    assert memory.report(model, _batch(), optimizer=small).states == 4 * numbers
    language_loss(model).backward()
    masters.step()
    steps = 4 * len(list(model.parameters()))
    assert memory.report(model, _batch(), optimizer=masters).states == 12 * numbers + steps


def test_a_budget_that_is_large_enough_needs_no_policy() -> None:
    model = gpt2(layers=2)
    found = memory.fit(model, _batch(), 2**30)
    assert found.policy == memory.Policy() and "nothing" in str(found)


@pytest.mark.parametrize("with_offload", [False, True])
def test_a_fit_keeps_its_budget_and_the_bits(with_offload: bool) -> None:
    model = gpt2(layers=4)
    expected = results(model, language_loss)
    usual = memory.report(model, _batch())
    budget = usual.weights + int(0.75 * usual.dynamic)
    model.zero_grad(set_to_none=True)
    found = memory.fit(model, _batch(), budget, with_offload=with_offload)
    assert found.policy.rules and found.peak <= budget
    # On a busy machine a prefetch may run ahead of the step and hold a layer more for a moment.
    tries = 3 if with_offload else 1
    least = min(peak(model, language_loss) for _ in range(tries))
    assert usual.weights + least <= 1.01 * budget
    assert_same_bits(results(model, language_loss), expected)
    assert len(found.candidates) == (4 if with_offload else 2)
    assert str(found.policy) in str(found)


def test_fewer_layers_are_recomputed_for_a_larger_budget() -> None:
    model = gpt2(layers=4)
    usual = memory.report(model, _batch())
    chosen = []
    for share in (0.95, 0.65):
        found = memory.fit(model, _batch(), usual.weights + int(share * usual.dynamic))
        layers = {candidate.name: candidate.layers for candidate in found.candidates}
        chosen.append(layers["recompute"])
    assert chosen[0] < chosen[1]


def test_an_impossible_budget_is_an_error_with_the_smallest_that_is_possible() -> None:
    model = gpt2(layers=2)
    with pytest.raises(MemoryError, match="is the smallest that is possible") as caught:
        memory.fit(model, _batch(), 1000)
    assert policy_state_of(model) is None
    smallest = int(str(caught.value).split(", and ")[1].split(" ")[0])
    assert memory.fit(model, _batch(), int(1.01 * smallest)).peak <= 1.01 * smallest


class Block(nn.Module):
    def __init__(self, *inside: nn.Module, size: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.inside = nn.ModuleList(inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.inside:
            x = each(x)
        return x + self.down(self.up(x).sin())


class OtherBlock(Block):
    pass


class Stack(nn.Module):
    """A container of its own kind: with numbered members, and no forward."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            self.add_module(f"block_{index}", block)


class Tower(nn.Module):
    """Blocks in any container, and more around them."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Linear(64, 64)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        inside = {inner for each in blocks for inner in each.inside}
        for block in blocks:
            x = block(x) if block not in inside else x
        return x


class Parts(Tower):
    """Calls the linear layers of blocks, and no block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.modules():
            if isinstance(module, Block):
                x = module.down(module.up(x))
        return x


def shared() -> nn.Module:
    """Return a model in which one layer is a member of both lists."""
    block = Block()
    return Tower(a=nn.ModuleList([block, Block()]), b=nn.ModuleList([block, Block()]))


def nested() -> nn.Module:
    return Tower(a=Stack(*(Block(*(Block() for _ in range(3))) for _ in range(2))))


LAYERS: dict[str, tuple[Any, list[str]]] = {
    "list": (lambda: Tower(a=nn.ModuleList([Block(), Block()])), ["a.0", "a.1"]),
    "dictionary": (lambda: Tower(a=nn.ModuleDict({"x": Block(), "y": Block()})), ["a.x", "a.y"]),
    "container": (lambda: Tower(a=Stack(Block(), Block())), ["a.block_0", "a.block_1"]),
    "attributes": (lambda: Tower(first=Block(), second=Block()), ["first", "second"]),
    "two stacks of one class": (
        lambda: Tower(a=Tower(s=Stack(Block(), Block())), b=Tower(s=Stack(Block(), Block()))),
        ["a.s.block_0", "a.s.block_1", "b.s.block_0", "b.s.block_1"],
    ),
    "two classes": (
        lambda: Tower(a=Stack(Block(), Block()), b=Stack(OtherBlock(), OtherBlock())),
        ["a.block_0", "a.block_1", "b.block_0", "b.block_1"],
    ),
    "blocks that hold more": (nested, ["a.block_0", "a.block_1"]),
    "unlike members": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
        ["0", "1", "2"],
    ),
    "parts are called": (lambda: Parts(a=nn.ModuleList([Block(), Block()])), ["a.0", "a.1"]),
    "one member": (lambda: Tower(a=nn.ModuleList([Block()])), ["a.0"]),
    "a member of two lists": (shared, ["a.0", "a.1", "b.1"]),
}


@pytest.mark.parametrize(("make", "names"), LAYERS.values(), ids=LAYERS)
def test_layers_are_found_wherever_they_are_held(make: Any, names: list[str]) -> None:
    model = make()
    x, loss = torch.randn(512, 64), lambda output: output.square().sum()
    assert list(lists_of(model)) == names
    found = memory.report(model, x, loss=loss)
    assert found.weights == sum(parameter.nbytes for parameter in model.parameters())
    kept = {layer: of.get("activation", 0) for layer, of in found.layers.items()}
    assert set(names) <= {layer for _, layer, _ in found.timeline}
    assert kept.get("", 0) <= 0.02 * sum(kept.values())
    if type(model) is Tower and len(names) > 1:
        policy = memory.fit(model, x, int(0.97 * found.peak), loss=loss).policy
        assert policy.rules and set(policy.rules[0].modules) <= set(names)


def test_our_transformer_is_reported_and_fitted() -> None:
    config = preset("tiny-llama")
    torch.manual_seed(0)
    model = Transformer(config)
    ids = torch.randint(config.vocab_size, (2, 64))
    batch = {"tokens": ids, "labels": ids}
    expected = results(model, lambda model: model(**batch).total)
    found = memory.report(model, batch)
    kept = {layer: of.get("activation", 0) for layer, of in found.layers.items()}
    assert kept["layers.0"] + kept["layers.1"] >= 0.8 * sum(kept.values())
    assert kept.get("", 0) <= 0.02 * sum(kept.values())
    fitted = memory.fit(model, batch, found.peak - 100_000)
    assert fitted.policy.rules and fitted.peak <= found.peak - 100_000
    assert_same_bits(results(model, lambda model: model(**batch).total), expected)


def test_losses_are_found_or_asked_for() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"name": "no tensor", "x": x}

    with pytest.raises(TypeError, match="report: no loss was found"):
        memory.report(Named(3, 3), torch.ones(3))
    model, x = encoder(layers=2), torch.randn(1, 4, 32)
    assert memory.report(model, x).peak > 0
    assert memory.report(model, (x,), loss=lambda output: output.square().sum()).peak > 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: memory.report(3, 4), TypeError, "model must be"),
        (lambda: memory.report(nn.Linear(1, 1), 4, loss=3), TypeError, "loss must be"),
        (lambda: memory.report(nn.Linear(1, 1), 4, optimizer=3), TypeError, "optimizer must be"),
        (lambda: StepMemory("model"), TypeError, "StepMemory: model must be"),
        (lambda: StepMemory(nn.Linear(2, 2), optimizer=3), TypeError, "optimizer must be"),
        (lambda: memory.fit(nn.Linear(1, 1), 4, 0), ValueError, "budget must be at least 1"),
        (lambda: memory.fit(nn.Linear(1, 1), 4, "1G"), TypeError, "budget must be an int"),
        (lambda: memory.fit(nn.Linear(1, 1), 4, 9), ValueError, "model has no layers"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


ROWS, WIDTH = 32, 64


def linear_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh()) * 3)


def loss_of_part(model: nn.Module, part: int) -> torch.Tensor:
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
            torch.autograd.backward([loss_of_part(model, part) for part in range(parts)])
            return
        for part in range(parts):
            loss_of_part(model, part).backward()

    return recorded(model, step)


def test_a_step_of_a_loop_holds_what_the_report_says() -> None:
    model = gpt2()
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = memory.report(model, inputs, optimizer=AdamW(model.parameters()))
    found = recorded(model, lambda: model(**inputs).loss.backward())
    for name in ("named", "layers", "weights", "states", "gradients", "phase"):
        assert getattr(found, name) == getattr(expected, name), name


def test_micro_batches_that_are_alive_together_hold_as_many_activations() -> None:
    one, four = (micro_batches(linear_layers(), parts, together=True) for parts in (1, 4))
    # The outputs of tanh, which its backward and the next linear layer share, and the mean.
    assert one.activations >= 3 * ROWS * WIDTH * 4
    assert four.activations == pytest.approx(4 * one.activations, rel=0.02)


def test_micro_batches_one_after_another_hold_those_of_one() -> None:
    model = linear_layers()
    one, four = (micro_batches(model, parts, together=False) for parts in (1, 4))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert one.gradients == four.gradients == weights
    # The gradients of the micro-batch before are there when the next backward begins.
    assert four.activations == pytest.approx(one.activations + weights, rel=0.02)
    assert sum(kinds.get("gradient", 0) for kinds in four.layers.values()) == weights
    assert {name for name in four.layers if name} <= {str(number) for number in range(6)}


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
