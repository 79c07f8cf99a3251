"""Recomputation: the same bits as without, whatever a second forward meets, in fewer bytes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import (
    CHECKED,
    POLICIES,
    assert_keeps_bits,
    encoder,
    encoder_loss,
    gpt2,
    language_loss,
    peak,
    results,
    squared,
)
from torch import nn

import fusedops
from fusedops import memory
from fusedops.memory.apply import policy_state_of


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
def test_recomputed_gpt2_gives_the_same_bits_in_less_memory(patched: bool) -> None:
    model = gpt2(patched=patched)
    expected, before = results(model, language_loss), peak(model, language_loss)
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))
    assert_same_bits(results(model, language_loss), expected)
    assert peak(model, language_loss) < 0.7 * before
    memory.remove(model)
    assert_same_bits(results(model, language_loss), expected)
    assert peak(model, language_loss) > 0.9 * before
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_model_with_a_cache_is_recomputed_without_it() -> None:
    model = gpt2()
    expected = results(model, language_loss)
    model.config.use_cache = True
    memory.apply(model, memory.Policy(memory.recompute("transformer.h.*")))
    assert_same_bits(results(model, language_loss), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_model_has_the_policy_for_its_own_layers(duplicate: Callable[..., Any]) -> None:
    model = encoder(dropout=0.2)
    expected = results(model, encoder_loss)
    policy = memory.Policy(memory.recompute("*"), memory.save(ops="attention"))
    memory.apply(model, policy)
    twin = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = policy_state_of(twin)
    assert state is not None and state.policy == policy and state.model is twin
    assert_same_bits(results(twin, encoder_loss), expected)


def test_a_forward_that_differs_the_second_time_is_an_error() -> None:
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.exp() if self.calls == 1 else x[:1].exp()

    model = nn.Sequential(Fickle())
    memory.apply(model, memory.Policy(memory.recompute("0")))
    loss = model(torch.randn(3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"of 0 kept \[1\].* the first kept \[3\]"):
        loss.backward()


class Asks(nn.Module):
    """Computes other things where its arguments are one tensor."""

    def forward(self, x: torch.Tensor, others: Any, *, again: torch.Tensor) -> torch.Tensor:
        same = sum(x is each for each in (others[0], others[1]["x"], again))
        return (x * others[1]["y"]).sin() if same == 3 else x.exp() + again.exp().tanh()


class Attends(nn.Module):
    """Attention of a sequence to itself, as argument by name too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, x, x)
        return x + self.attention(x, key=x, value=x)[0]


class Calls(nn.Module):
    """Calls a module with one tensor in several places, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Asks()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x, [x, {"x": x, "y": x[:1]}], again=x) * self.scale
        return self.inner(x, [x, {"x": x, "y": x[:1]}], again=x)


@pytest.mark.parametrize("make", [Attends, Calls])
@pytest.mark.parametrize(
    "rules",
    [
        [memory.recompute("*")],
        [memory.recompute("*"), memory.offload("*")],
        [memory.recompute("*"), memory.save(ops="aten::bmm")],
        [memory.recompute(ops=["aten::mul", "aten::bmm"])],
        [memory.offload("*")],
    ],
    ids=lambda rules: ", ".join(map(str, rules)),
)
def test_one_tensor_as_several_arguments_is_one_tensor_again(
    make: type[nn.Module], rules: list[Any]
) -> None:
    torch.manual_seed(0)
    assert_keeps_bits(make(), squared(torch.randn(2, 5, 8)), rules)


class Writes(nn.Module):
    """Writes to what an operator has returned, or read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).add_(1).sin() * x
        z = self.up(y)
        doubled = z * 2
        z.add_(1)
        return self.up(doubled.sin()) + z


class WritesOutside(nn.Module):
    """Writes to what a layer has returned, when all has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Returns()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.inner(x)
        y.add_(3)
        return y + z


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.up(x)
        return y, (y * 2).exp()


_SAVES = [memory.recompute("**"), memory.save(ops="aten::addmm")]


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (Writes, _SAVES),
        (Writes, [*_SAVES, memory.offload(ops="aten::addmm")]),
        (Writes, [memory.recompute(ops="aten::mul")]),
        (WritesOutside, _SAVES),
    ],
)
def test_what_is_written_to_after_an_operator_is_made_again_as_it_was(
    make: type[nn.Module], rules: list[Any]
) -> None:
    torch.manual_seed(0)
    assert_keeps_bits(nn.Sequential(make()), squared(torch.randn(4, 8)), rules)


class Experts(nn.Module):
    """A layer of experts with a residual, whose router draws jitter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = fusedops.nn.MoE(32, 64, num_experts=4, top_k=2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.experts(x)
        return x + self.dropout(out[0] if isinstance(out, tuple) else out)


def experts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Experts(), Experts())


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return language_loss(model)


def of_two_batches(model: nn.Module) -> torch.Tensor:
    return encoder_loss(model) + 2 * encoder_loss(model)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor], str]] = {
    "experts and dropout": (experts, lambda model: encoder_loss(model, 32), "*"),
    "patched under autocast": (lambda: gpt2(layers=2), under_autocast, "transformer.h.*"),
    "stock under autocast": (lambda: gpt2(patched=False, layers=2), under_autocast, "*.h.*"),
    "several batches": (encoder, of_two_batches, "*"),
}


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload", "both"])
@pytest.mark.parametrize("case", CASES)
def test_a_second_forward_replays_to_the_bit(case: str, policy: str) -> None:
    make, loss, modules = CASES[case]
    assert_keeps_bits(make(), loss, POLICIES[policy](modules), steps=2)


def test_routing_cannot_flip_in_the_second_forward() -> None:
    """Noise that a second forward would see differently: the choices stay those of the first."""
    seen: list[torch.Tensor] = []

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 32))
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = x @ self.weight.t()
            if self.runs:
                logits = logits + logits.detach().roll(1, -1) * 3
            self.runs += 1
            plan = fusedops.moe_route(logits, 2)
            seen.append(plan.expert_ids.clone())
            return plan.probs.exp()

    model = nn.Sequential(Noisy())
    memory.apply(model, memory.Policy(memory.recompute("0")))
    model(torch.randn(64, 32)).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_forward_without_gradients_runs_as_it_did() -> None:
    model = encoder(dropout=0.0)
    with torch.no_grad():
        expected = encoder_loss(model)
    memory.apply(model, memory.Policy(memory.recompute("*"), memory.offload("*")))
    with torch.no_grad():
        assert torch.equal(encoder_loss(model), expected)


@pytest.mark.parametrize(
    "policy", [memory.recompute("*"), memory.offload("*"), memory.recompute(ops="layer_norm")]
)
def test_second_derivatives_are_those_of_the_plain_model(policy: Callable[..., object]) -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return grad.square().sum()

    model = nn.Sequential(nn.Linear(32, 32), fusedops.nn.LayerNorm(32), nn.Tanh())
    expected = results(model, penalty)
    memory.apply(model, memory.Policy(policy), offload_settings=CHECKED)
    found = results(model, penalty)
    for name, wanted in expected.items():
        assert wanted is not None and found[name] is not None
        torch.testing.assert_close(found[name], wanted)
