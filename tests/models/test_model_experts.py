"""Experts in a ``Transformer``: shared ones, biases that balance, hashes, capacities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedops import memory
from fusedops.models import ParallelConfig, Transformer, TransformerConfig, parallelize, preset
from fusedops.nn import MoE

HASH: dict[str, Any] = {"router": "hash", "balance_loss": 0.0}
KINDS: dict[str, TransformerConfig] = {
    "gated shared": replace(preset("tiny-mixtral"), shared_size=48, shared_gate=True),
    "plain shared with biases": replace(preset("tiny-pangu-moe"), shared_size=32),
    "bias": replace(preset("tiny-mixtral"), balance_rate=0.1, balance_loss=0.0),
    "hash": replace(preset("tiny-pangu-moe"), **HASH, capacity_factor=None),
    "capacity": replace(preset("tiny-mixtral"), capacity_factor=1.0, drop_policy="probability"),
    "rounds": replace(preset("tiny-pangu-moe"), top_k=2, drop_policy="rounds"),
    "groups": replace(preset("tiny-mixtral"), num_groups=2, topk_groups=1, group_score="top2_sum"),
}


def _run(model: Transformer) -> tuple[Any, Any, torch.Tensor]:
    """Return the engine of a model on one process, a batch, and how many tokens count."""
    run = parallelize(model, ParallelConfig())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, (4, 1), generator=generator) + torch.arange(24) % 5
    shard = run.shard_batch(tokens[:, :-1], tokens[:, 1:])
    return run, shard, run.count(shard.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_experts_has_its_parameters_and_trains(kind: str) -> None:
    torch.manual_seed(0)
    model = Transformer(KINDS[kind])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == model.config.parameters().total
    run, shard, count = _run(model)
    optimizer = run.optimizer(lr=3e-3)
    losses = []
    for _ in range(8):
        losses.append(float(run.mean_loss(run.step([shard], count), count)))
        optimizer.step()
        run.balance()
        assert all(each.grad is not None for each in model.parameters())
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_a_layer_without_a_router_wants_a_plan() -> None:
    moe = MoE(8, 16, 4, 1, router=False)
    assert "gate.weight" not in moe.state_dict()
    with pytest.raises(ValueError, match="plan must be given to a layer that has no router"):
        moe(torch.ones(2, 8))


def _layers(model: Transformer) -> list[Any]:
    return list(model.layers.values())


@pytest.mark.parametrize("recomputed", [False, True])
def test_biases_move_by_the_choices_of_the_step_alone(recomputed: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(KINDS["bias"])
    run, shard, count = _run(model)
    layers = _layers(model)
    gates = [layer.feed_forward.gate for layer in layers]
    seen: dict[Any, torch.Tensor] = {}

    def note(module: Any, args: Any, output: Any) -> None:
        seen[module] = output[1].tokens_per_expert

    hooks = [gate.register_forward_hook(note) for gate in gates]
    if recomputed:
        memory.apply(model, memory.Policy(memory.recompute("layers.*")))
    run.forward([shard])  # counts nothing
    seen.clear()
    run.step([shard], count)
    for hook in hooks:
        hook.remove()
    for layer, gate in zip(layers, gates, strict=True):
        assert torch.equal(layer.balancing.tokens_per_expert, seen[gate])
        assert int(seen[gate].sum()) == 2 * shard.tokens.numel()
    run.balance()
    for layer, gate in zip(layers, gates, strict=True):
        moved = 0.1 * torch.sign(seen[gate].double().mean() - seen[gate]).float()
        torch.testing.assert_close(gate.e_score_correction_bias, moved)
        assert moved.any() and not layer.balancing.tokens_per_expert.any()
    before = [gate.e_score_correction_bias.clone() for gate in gates]
    run.step([shard], count)
    run.balance(stepped=False)  # the optimizer made no step
    run.balance()
    assert all(map(torch.equal, (gate.e_score_correction_bias for gate in gates), before))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_stay_float32_in_half_precision(device: str) -> None:
    model = Transformer(KINDS["bias"], device=device, dtype=torch.bfloat16)
    if device == "meta":
        model.to_empty(device="cpu")
    gate = _layers(model)[0].feed_forward.gate
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.dtype == torch.float32


def test_hashed_experts_follow_from_token_domain_and_layer() -> None:
    torch.manual_seed(0)
    config = replace(preset("tiny-mixtral"), **HASH, top_k=1, domain_experts=(1, 3))
    model = Transformer(config)
    tokens = torch.arange(64).reshape(2, 32)
    domains = torch.zeros_like(tokens)
    domains[1] = 1
    chosen: list[torch.Tensor] = []
    for layer in _layers(model):
        layer.feed_forward.register_forward_pre_hook(
            lambda module, args, kwargs: chosen.append(kwargs["plan"].expert_ids[:, 0]),
            with_kwargs=True,
        )
    model(tokens, domains=domains)
    first, second = chosen
    assert not first[:32].any() and set(first[32:].tolist()) == {1, 2, 3}
    assert not torch.equal(first, second)
    chosen.clear()
    model(tokens.flip(1), domains=domains)
    assert torch.equal(chosen[0], first.reshape(2, 32).flip(1).flatten())


def test_domains_are_asked_for_where_they_decide_and_only_there() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="domains must be None without domain_experts"):
        Transformer(preset("tiny-mixtral"))(tokens, domains=tokens)
    config = replace(preset("tiny-mixtral"), **HASH, top_k=1, domain_experts=(1, 3))
    model = Transformer(config)
    with pytest.raises(ValueError, match="domains must be given with domain_experts, got None"):
        model(tokens)
    with pytest.raises(ValueError, match=r"domains must be from 0 to 1, of .* got 2"):
        model(tokens, domains=tokens + 2)
