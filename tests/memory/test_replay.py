"""What a second forward must find as the first did: dropout, routing, autocast, surroundings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import assert_same_bits, encoder, encoder_loss, gpt2, language_loss, results
from torch import nn

import fusedops
from fusedops import memory

POLICIES = {
    "whole": [memory.recompute("*")],
    "selective": [memory.recompute("*"), memory.save(ops=["attention", "aten::addmm", "aten::mm"])],
    "offload": [memory.offload("*")],
    "both": [memory.recompute("*"), memory.offload("*")],
}
SETTINGS = memory.OffloadSettings(least_bytes=1, check=True)


def _policy(name: str, modules: str) -> memory.Policy:
    rules = {
        "whole": [memory.recompute(modules)],
        "selective": [
            memory.recompute(modules),
            memory.save(ops=["attention", "aten::addmm", "aten::mm"]),
        ],
        "offload": [memory.offload(modules)],
        "both": [memory.recompute(modules), memory.offload(modules)],
    }
    return memory.Policy(*rules[name])


class Experts(nn.Module):
    """A layer of experts with a residual, whose router draws jitter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = fusedops.nn.MoE(32, 64, num_experts=4, top_k=2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.experts(x)
        return x + self.dropout(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_and_dropout_replay_to_the_bit(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    expected = results(model, encoder_loss_of_32)
    memory.apply(model, _policy(policy, "*"), offload_settings=SETTINGS)
    for _ in range(2):
        assert_same_bits(results(model, encoder_loss_of_32), expected)


def encoder_loss_of_32(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    return (model(x) * x.roll(1, -1)).mean()


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
def test_gpt2_under_autocast_gives_the_same_bits(policy: str, patched: bool) -> None:
    model = gpt2(patched=patched, layers=2)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_loss(model)

    expected = results(model, loss)
    memory.apply(model, _policy(policy, "transformer.h.*"), offload_settings=SETTINGS)
    assert_same_bits(results(model, loss), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_several_batches_add_up(policy: str) -> None:
    model = encoder()

    def loss(model: nn.Module) -> torch.Tensor:
        return encoder_loss(model) + 2 * encoder_loss(model)

    expected = results(model, loss)
    memory.apply(model, _policy(policy, "*"), offload_settings=SETTINGS)
    assert_same_bits(results(model, loss), expected)


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
    memory.apply(model, memory.Policy(policy), offload_settings=SETTINGS)
    found = results(model, penalty)
    for name, wanted in expected.items():
        assert wanted is not None and found[name] is not None
        torch.testing.assert_close(found[name], wanted)
