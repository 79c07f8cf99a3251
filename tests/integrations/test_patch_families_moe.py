"""Families with experts: a patched model trains and generates as the stock one.

What every causal language model must do is tested in ``test_patch_families.py``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from causal_families import IDS, SPARSE, Family, loss
from patch_testing import assert_all_close, assert_close, assert_same_training, counted
from torch import nn

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf.rules.experts import experts_forward

of_each_family = pytest.mark.parametrize("family", SPARSE.values(), ids=SPARSE)


@of_each_family
def test_other_implementations_are_served_and_match(family: Family) -> None:
    for name in ("grouped_mm", "batched_mm"):
        patched, stock = family.pair(experts_implementation=name)
        with counted() as calls:
            assert_close(patched(IDS).logits, stock(IDS).logits)
        assert calls["moe_mlp"] == family.ops["moe_mlp"]


@of_each_family
def test_the_registered_implementation_needs_no_patch(family: Family) -> None:
    fusedops.register_experts()
    stock = family.model()
    named = copy.deepcopy(stock)
    named.set_experts_implementation("fusedops")
    with counted() as calls:
        assert_same_training(named, stock, loss)
    assert calls["moe_mlp"] == family.ops["moe_mlp"]


@of_each_family
def test_router_logits_are_recorded(family: Family) -> None:
    if family.name == "DeepseekV3":
        pytest.skip("transformers records no router logits of DeepSeek-V3")
    patched, stock = family.pair()
    with counted() as calls:
        found, expected = (
            model(IDS, output_router_logits=True, labels=IDS) for model in (patched, stock)
        )
    assert calls["moe_mlp"] == 2
    assert len(found.router_logits) == 2
    assert_all_close(found.router_logits, expected.router_logits)
    assert_close(found.aux_loss, expected.aux_loss)
    assert_close(found.loss, expected.loss)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def _choices(experts: Any, tokens: int = 9, k: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    input = torch.randn(tokens, 32, requires_grad=True)
    ids = torch.rand(tokens, experts.num_experts).topk(k)[1]
    return input, ids, torch.rand(tokens, k).requires_grad_()


@of_each_family
def test_experts_of_another_process_are_left_out(family: Family) -> None:
    """Expert parallelism names them by ``num_experts``; their weight is 0 or anything."""
    patched, stock = family.pair(experts_implementation="grouped_mm")
    ours, theirs = _experts(patched)[0], _experts(stock)[0]
    theirs._is_expert_parallel = True  # as transformers 5.23 sets on modules that it splits
    input, ids, weights = _choices(theirs)
    ids[::2, 0] = theirs.num_experts
    ids[4] = theirs.num_experts
    masked = weights.masked_fill(ids == theirs.num_experts, 0.0)
    found, expected = ours(input, ids, weights), theirs(input, ids, masked)
    assert_close(found, expected)
    assert (found[4] == 0).all()
    names = ["input", "weights", *dict(theirs.named_parameters())]
    for name, actual, wanted in zip(
        names,
        torch.autograd.grad(found.square().sum(), [input, weights, *ours.parameters()]),
        torch.autograd.grad(expected.square().sum(), [input, weights, *theirs.parameters()]),
        strict=True,
    ):
        # Transformers 5.15 adds up memory that nobody wrote in the gradient of this bias.
        if name != "gate_up_proj_bias" or not transformers.__version__.startswith("5.15."):
            assert_close(actual, wanted)


def test_a_norm_at_the_end_of_each_expert_is_applied() -> None:
    """Before the weights, by ``has_post_expert_norm`` of transformers 5.23."""
    experts = _experts(SPARSE["Mixtral"].model())[0]
    experts.has_post_expert_norm = True
    experts.post_expert_norm = nn.RMSNorm(32)
    input, ids, weights = _choices(experts)
    found = experts_forward(experts, input, ids, weights)
    each = (experts.gate_up_proj[ids] @ input[:, None, :, None]).squeeze(-1)
    gate, up = each.chunk(2, -1)
    each = experts.down_proj[ids] @ (experts.act_fn(gate) * up)[..., None]
    assert_close(found, (experts.post_expert_norm(each.squeeze(-1)) * weights[..., None]).sum(1))


def test_a_gate_of_its_own_is_called_between_two_products() -> None:
    patched, stock = SPARSE["GptOss"].pair()
    for model in (patched, stock):
        for experts in _experts(model):
            experts.limit = 0.5
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert (calls["moe_mlp"], calls["grouped_mm"]) == (0, 4)
    report = describe(patched)
    assert report["model.layers.0.mlp.experts"].reason == "its own gate between two grouped_mm"


def test_a_hook_on_the_activation_is_called() -> None:
    patched, stock = SPARSE["Mixtral"].pair(experts_implementation="grouped_mm")
    shapes: list[torch.Size] = []
    for model in (patched, stock):
        _experts(model)[0].act_fn.register_forward_hook(
            lambda module, args, output: shapes.append(output.shape)
        )
    with counted() as calls:
        assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["grouped_mm"] > 0
    assert len(shapes) >= 2
    assert shapes[0] == shapes[-1]


def test_an_implementation_for_a_device_is_kept() -> None:
    patched, _ = SPARSE["Mixtral"].pair()
    patched.config._experts_implementation_internal = "sonicmoe"
    report = describe(patched)
    assert "configured as 'sonicmoe'" in report["model.layers.0.mlp.experts"].reason


def test_sinks_of_gpt_oss_take_their_share() -> None:
    patched, stock = SPARSE["GptOss"].pair()
    with torch.no_grad():
        for model in (patched, stock):
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(5.0)
    assert_same_training(patched, stock, loss)
    with torch.no_grad():
        patched.model.layers[0].self_attn.sinks.fill_(-5.0)
    assert not torch.equal(patched(IDS).logits, stock(IDS).logits)


def test_norms_of_gpt_oss_stay_float32_in_bfloat16() -> None:
    patched, stock = (model.to(torch.bfloat16) for model in SPARSE["GptOss"].pair())
    for model in (patched, stock):
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.float()
    with counted() as calls:
        found = loss(patched)
    assert calls["rms_norm"] == 5
    assert found.isfinite()
