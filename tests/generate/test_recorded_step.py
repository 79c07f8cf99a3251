"""Recorded operator calls give the bits of the step itself, or are not run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fusedops.generation import Decoder
from fusedops.generation.recorded_step import RecordedStep
from fusedops.models import TINY, Transformer

PROMPTS = [torch.tensor([5, 17, 3]), torch.tensor([7, 8, 9])]


def decoder(name: str, **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Transformer(replace(TINY[name], initializer_range=0.2, seq_len=128, **options)).eval()
    return Decoder(model, 128)


def decode(made: Decoder, prompts: list[torch.Tensor], steps: int) -> torch.Tensor:
    logits = [made.prefill(prompts)]
    for step in range(steps):
        rows = {20: [1, 0], 30: [1]}.get(step)
        if rows is not None:
            made.select(torch.tensor(rows))
            logits.append(logits[-1][rows])
        logits.append(made.step(logits[-1].argmax(-1)))
    return torch.cat(logits)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal lengths", "lengths differ"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-mixtral"])
def test_logits_are_those_of_the_modules(name: str, unequal: bool) -> None:
    # Other rows on the way, and more tokens than the first capacity of a cache.
    options = {"sliding_window": 6} if name == "tiny-llama" else {}
    prompts = [*PROMPTS[:1], PROMPTS[1][: 2 if unequal else 3]]
    recorded, by_modules = decoder(name, **options), decoder(name, **options)
    by_modules._recorded.reason = "by modules"
    actual = decode(recorded, prompts, 90)
    assert torch.equal(actual, decode(by_modules, prompts, 90))
    assert recorded._recorded.reason is None
    assert recorded._recorded._repeats


def test_weights_may_change_in_place() -> None:
    made = decoder("tiny-llama")
    before = decode(made, PROMPTS, 5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(0.5)
    after = decode(made, PROMPTS, 5)
    assert not torch.equal(before, after)
    made._recorded.reason = "by modules"
    assert torch.equal(decode(made, PROMPTS, 5), after)


class Named(nn.Identity):
    """A class that fusedops does not know: its forward may do more than call operators."""


@pytest.mark.parametrize("change", ["hook", "hook of the model", "module", "parameter", "forward"])
def test_changes_between_two_steps_are_seen(change: str) -> None:
    made = decoder("tiny-llama")
    logits = made.prefill(PROMPTS)
    for _ in range(4):
        logits = made.step(logits.argmax(-1))
    assert made._recorded._repeats
    model, calls = made.model, []
    if "hook" in change:
        owner = model if "model" in change else model.layers["0"]
        owner.register_forward_hook(lambda *_: calls.append(1))
    elif change == "module":
        model.norm = Counted(model.norm, calls)
    elif change == "parameter":
        model.norm.weight = nn.Parameter(2 * model.norm.weight.detach())
    else:
        own = model.norm.forward
        model.norm.forward = lambda x: (calls.append(1), own(x))[1]  # type: ignore[method-assign]
    tokens = logits.argmax(-1)
    changed = made.step(tokens)
    assert made._recorded.reason is not None
    assert len(calls) == (change != "parameter")
    if change == "parameter":
        by_modules = decoder("tiny-llama")
        by_modules._recorded.reason = "by modules"
        logits = by_modules.prefill(PROMPTS)
        for _ in range(4):
            logits = by_modules.step(logits.argmax(-1))
        by_modules.model.norm.weight.data.mul_(2)
        assert torch.equal(changed, by_modules.step(tokens))


class Counted(nn.Sequential):
    """Counts its calls."""

    def __init__(self, module: nn.Module, calls: list[int]) -> None:
        super().__init__(module)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        output: torch.Tensor = self[0](x)
        return output


@pytest.mark.parametrize("change", ["hook", "class"])
def test_other_modules_run_in_every_step(change: str) -> None:
    model = decoder("tiny-llama").model
    calls = []
    if change == "hook":
        model.layers["0"].register_forward_hook(lambda *_: calls.append(1))
    else:
        model.norm = nn.Sequential(model.norm, Named())
    made = Decoder(model, 128)
    expected = "layers.0 has hooks" if change == "hook" else "norm.1 is a Named"
    assert made._recorded.reason == expected
    decode(made, PROMPTS, 5)
    assert len(calls) == (6 if change == "hook" else 0)


class Steps(nn.Module):
    """Functions of a tensor; those that no recording may repeat have another result each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.kept = torch.zeros(4)
        self.calls = 0

    def lists(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (x * 2.0).split(2, -1)
        joined = torch.cat([right, left, self.weight[:2].expand(len(x), 2)], -1)
        return torch.where(joined > 1, joined, -joined).index_select(0, torch.arange(len(x)))

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(x.sum(0))
        return self.kept.clone()

    def scalar(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * float(self.calls)

    def length(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.cat([x] * self.calls)

    def item(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    def stranger(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.from_numpy(torch.full((4,), float(self.calls)).numpy())


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("lists", True),
        ("in_place", True),
        ("scalar", False),
        ("length", False),
        ("item", False),
        ("stranger", False),
    ],
)
def test_only_calls_that_are_the_same_in_every_step_are_repeated(name: str, repeats: bool) -> None:
    recorded, eager = Steps(), Steps()
    step = RecordedStep(recorded)
    step.reason = None  # the class is not one of fusedops
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            actual = step.run(getattr(recorded, name), [x], [recorded.kept])
            assert torch.equal(actual, getattr(eager, name)(x))
    assert step._repeats == repeats
    assert (step.reason is not None) == (name in ("item", "stranger"))


def test_an_error_in_a_step_ends_the_recording() -> None:
    step = RecordedStep(Steps())
    step.reason = None

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        step.run(fails, [torch.ones(2)], [])
    for _ in range(3):
        assert torch.equal(step.run(torch.neg, [torch.ones(2)], []), -torch.ones(2))
    assert step._repeats
