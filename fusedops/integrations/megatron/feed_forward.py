"""Megatron's feed-forward layers on the fused ops: dense, shared expert, experts one by one.

Where a linear layer is a plain product (one tensor-parallel rank, or an expert, whose tokens the
dispatcher has moved), it is one op with what follows it. Where it communicates, adds to a main
gradient or is watched, it is called, and the op does bias and activation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.moe import experts, shared_experts
from megatron.core.utils import get_pg_size

from fusedops.integrations.hf.original_code import is_plain
from fusedops.integrations.hf.rules.chain import GATES, GELUS, gated_product
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    Refusal,
    global_hooks,
    hooks_obstacle,
    runs_here,
)
from fusedops.ops.bias_gelu import bias_gelu
from fusedops.ops.linear_act import linear_act
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.mlp import mlp

_LINEARS = (ColumnParallelLinear, RowParallelLinear)
_NAMES = {
    F.silu: "silu",
    F.relu: "relu",
    activations.squared_relu: "relu2",
    activations.quick_gelu: "fast_gelu",
    fused_bias_geglu.quick_gelu: "fast_gelu",
}
_NO_OP = Refusal("no fused op has its activation behind these layers")


def activation_name(config: Any) -> str | None:
    """Return the name of the activation that Megatron computes, ``None`` where no op has it."""
    special = (
        config.use_te_activation_func
        or config.activation_func_fp8_input_store
        or config.activation_func_clamp_value is not None
        or config.glu_linear_offset != 0.0
    )
    if special:
        return None
    if config.activation_func is F.gelu:  # Megatron's fused form is the tanh one
        return "gelu_tanh" if config.bias_activation_fusion else "gelu"
    return _NAMES.get(config.activation_func)


def _is_product(linear: Any) -> bool:
    """Return whether the layer does nothing but a product, and has no hooks."""
    if type(linear) not in _LINEARS:
        return False
    alone = linear.explicit_expert_comm or get_pg_size(linear.tp_group) == 1
    extra = linear.gradient_accumulation_fusion or linear.config._cpu_offloading_context is not None
    hooks = hooks_obstacle("the layer", linear) or global_hooks()
    return alone and not extra and hooks is None and is_plain(linear.weight)


def plan(layer: Any) -> FusionPlan | Refusal:
    """Return the op that does most of a feed-forward layer in its current state, or why none."""
    name, first = activation_name(layer.config), layer.linear_fc1
    if name is None:
        return _NO_OP
    product = _is_product(first)
    if layer.config.gated_linear_unit:
        if product and first.bias is None:
            return FusionPlan(("linear_glu",), ("linear_fc1",))
        return FusionPlan(("swiglu" if name == "silu" else "geglu",)) if name in GATES else _NO_OP
    if product and _is_product(layer.linear_fc2):
        return FusionPlan(("mlp",), ("linear_fc1", "linear_fc2"))
    if product:
        return FusionPlan(("linear_act",), ("linear_fc1",))
    return FusionPlan(("bias_gelu",)) if name in GELUS and first.bias is not None else _NO_OP


class MLP(megatron_mlp.MLP):
    """Megatron's ``MLP`` with the fused ops."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the bias that is left to add, as Megatron's."""
        fusion, name = plan(self), activation_name(self.config)
        runs = runs_here(hidden_states) and hidden_states.numel() > 0
        if isinstance(fusion, Refusal) or name is None or not runs:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        (op,), first, second = fusion.ops, self.linear_fc1, self.linear_fc2
        if op == "mlp" and per_token_scale is None:
            weights = (first.weight, first.bias, second.weight, None)
            return mlp(hidden_states, *weights, activation=name), second.bias
        if op == "linear_glu":
            hidden = linear_glu(hidden_states, *first.weight.chunk(2), activation=name)
        elif op in ("mlp", "linear_act"):
            hidden = linear_act(hidden_states, first.weight, first.bias, activation=name)
        elif op == "bias_gelu":
            hidden, bias = first(hidden_states)
            hidden = bias_gelu(hidden, bias, GELUS[name])
        else:
            hidden, bias = first(hidden_states)
            gate, up = (hidden if bias is None else hidden + bias).chunk(2, dim=-1)
            hidden = gated_product(gate, up, name)
        if per_token_scale is None:
            return second(hidden)
        scale = per_token_scale.unsqueeze(-1)
        output, bias = second((hidden * scale).to(hidden.dtype))
        return output if bias is None else output + bias * scale, None


class SharedExpertMLP(shared_experts.SharedExpertMLP, MLP):
    """Megatron's ``SharedExpertMLP``, which scales what ``MLP`` computes."""


class SequentialMLP(experts.SequentialMLP):
    """Megatron's ``SequentialMLP``, whose experts it makes itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            if type(expert) is megatron_mlp.MLP:
                expert.__class__ = MLP


class TransformerLayer(transformer_layer.TransformerLayer):
    """Megatron's ``TransformerLayer``, which gives its groups to an ``MLP`` of that very class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.mlp) is megatron_mlp.MLP:
            self.mlp.__class__ = MLP
