"""Each argument of each module's constructor and forward takes each wrong value of its kind.

Torch's own constructors word the errors of what ``MultiheadAttention`` and the transformer layers
are made of; nested tensors are theirs as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wrong_values import complaints_about

import fusedops
from fusedops import nn

CONSTRUCTORS: dict[str, tuple[Any, ...]] = {
    "AddLayerNorm": (8,),
    "AddRMSNorm": (8,),
    "BalancingBias": (4,),
    "CrossEntropyLoss": (),
    "Dropout": (0.5,),
    "GatedMLP": (8, 16),
    "LayerNorm": (8,),
    "LinearAct": (8, 16),
    "LinearCrossEntropyLoss": (8, 16),
    "MLP": (8, 16),
    "MoE": (8, 16, 4, 2),
    "RMSNorm": (8,),
}
NUMBERS_AS_TORCH = ("eps",)
OF_TORCH = {"MultiheadAttention", "TransformerDecoderLayer", "TransformerEncoderLayer"}
X = torch.linspace(-1, 1, 24).view(3, 8)
TARGET = torch.tensor([0, 3, 1])
IDS = torch.tensor([[1, 0], [1, 2], [3, 0]])
PLAN = fusedops.RoutingPlan.from_choices(IDS, torch.full((3, 2), 0.5), 4)
MASK = torch.zeros(3, 3, dtype=torch.bool)

# Module -> arguments of a forward that is right, and the op whose name messages may begin with.
FORWARDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "AddLayerNorm": ((X, X), {}, "add_layer_norm"),
    "AddRMSNorm": ((X, X), {}, "add_rms_norm"),
    "CrossEntropyLoss": ((X, TARGET), {}, "cross_entropy"),
    "Dropout": ((X,), {}, "bias_dropout_add"),
    "GatedMLP": ((X,), {}, "linear_glu"),
    "LayerNorm": ((X,), {}, "layer_norm"),
    "LinearAct": ((X,), {}, "linear_act"),
    "LinearCrossEntropyLoss": ((X, TARGET), {}, "linear_cross_entropy"),
    "MLP": ((X,), {}, "mlp"),
    "MoE": ((X,), {"plan": PLAN}, "moe_mlp"),
    "MultiheadAttention": ((X, X, X), {"need_weights": False, "attn_mask": MASK}, ""),
    "RMSNorm": ((X,), {}, "rms_norm"),
    "TransformerDecoderLayer": ((X, X), {"tgt_mask": MASK, "memory_mask": MASK}, ""),
    "TransformerEncoderLayer": ((X,), {"src_mask": MASK}, ""),
}


def test_every_module_is_tested() -> None:
    assert {*CONSTRUCTORS} | OF_TORCH == set(nn.__all__)
    assert {*FORWARDS} | {"BalancingBias"} == set(nn.__all__)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_refuse_wrong_values(name: str) -> None:
    module = getattr(nn, name)
    complaints = complaints_about(
        module, name, CONSTRUCTORS[name], {}, takes_any_number=NUMBERS_AS_TORCH
    )
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_refuse_wrong_values(name: str) -> None:
    made = CONSTRUCTORS.get(name, (8, 2))
    module = getattr(nn, name)(*made).eval()
    args, kwargs, op = FORWARDS[name]
    complaints = complaints_about(
        module.forward, (name, op or name), args, kwargs, nested=name not in OF_TORCH
    )
    assert not complaints, "\n".join(complaints)


def test_the_counts_of_a_balancing_bias_come_of_a_plan() -> None:
    balancing = nn.BalancingBias(4)
    for wrong in (None, "plan", IDS):
        with pytest.raises(TypeError, match=r"BalancingBias.count: plan must be a RoutingPlan"):
            balancing.count(wrong)
    with pytest.raises(TypeError, match="update_balancing_bias: bias must be a torch.Tensor"):
        balancing.step("bias")
