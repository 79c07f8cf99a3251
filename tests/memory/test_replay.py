"""What a second forward must find as the first did: dropout, routing, autocast, surroundings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import (
    CHECKED,
    assert_keeps_bits,
    encoder,
    encoder_loss,
    gpt2,
    language_loss,
    results,
)
from torch import nn

import fusedops
from fusedops import memory
from fusedops.memory.policy import MemoryRule

POLICIES: dict[str, Callable[[str], list[MemoryRule]]] = {
    "whole": lambda modules: [memory.recompute(modules)],
    "selective": lambda modules: [
        memory.recompute(modules),
        memory.save(ops=["attention", "aten::addmm", "aten::mm"]),
    ],
    "offload": lambda modules: [memory.offload(modules)],
    "both": lambda modules: [memory.recompute(modules), memory.offload(modules)],
}


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
    "stock under autocast": (
        lambda: gpt2(patched=False, layers=2),
        under_autocast,
        "transformer.h.*",
    ),
    "several batches": (encoder, of_two_batches, "*"),
}


@pytest.mark.parametrize("policy", POLICIES)
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
