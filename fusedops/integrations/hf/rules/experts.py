"""The experts of transformers' families, through ``ExpertsInterface`` and by rule.

An experts module calls the function that is registered under the name in its configuration. A
patched one calls ``experts_forward`` for each known implementation, since these compute the same;
the loop of a class itself, ``eager``, is known by its code alone. Where the gate is a known formula
the complete layer is ``moe_mlp``, else the two products are ``grouped_mm`` and the module's own
``_apply_gate`` stands between them; its own norm follows them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations import moe

from fusedops._core import dtypes
from fusedops._core.activation import FAST_GELU_SLOPE
from fusedops.integrations.hf import known_code, symbolic
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import (
    WatchList,
    changed,
    context_obstacle,
    name_of,
    replaced,
    watched_function,
    with_inner,
)
from fusedops.integrations.hf.partitioned_weights import unsharded_shape
from fusedops.integrations.hf.rules import transformers_modules  # noqa: F401 (its activations)
from fusedops.integrations.hf.rules.activations import activation_in
from fusedops.integrations.hf.rules.recognition import ClampedGate, clamped_gate_of
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.symbolic import at
from fusedops.ops._moe_gate import LIMIT, SWIGLU_OAI
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.grouped_mm import grouped_mm
from fusedops.ops.moe_mlp import moe_mlp
from fusedops.ops.moe_permute import moe_permute
from fusedops.ops.moe_unpermute import moe_unpermute

NAME = "fusedops"


class Gate(NamedTuple):
    """What stands between the two products, in the words of ``moe_mlp``."""

    activation: str
    gated: bool = True
    interleaved: bool = False


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute what transformers' own experts functions do, with the fused ops.

    An index ``module.num_experts`` in ``top_k_index`` ``[tokens, k]`` means an expert of another
    process, whose share is left out. The result ``[tokens, hidden_size]`` has the dtype of
    ``hidden_states``. What no op serves goes to transformers' ``grouped_mm``, as does a call with
    arguments of a later transformers.
    """
    if (
        kwargs
        or not runs_here(hidden_states)
        or changed(WatchList(), module) is not None
        or context_obstacle() is not None
    ):
        return moe.grouped_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights, **kwargs
        )
    plan = RoutingPlan.from_choices(top_k_index, top_k_weights, module.num_experts)
    w1, w2, b1, b2 = weights = _weights(module)
    rows = hidden_states
    if rows.dtype != w1.dtype and dtypes.autocast_dtype(rows.device) is None:
        rows = rows.to(w1.dtype)
    gate = known_gate(module)
    if gate is not None:
        output = moe_mlp(
            rows,
            plan,
            *weights,
            activation=gate.activation,
            gated=gate.gated,
            interleaved=gate.interleaved,
            recompute=False,  # less than transformers keeps
        )
        return output.to(hidden_states.dtype)
    hidden = grouped_mm(moe_permute(rows, plan), w1, plan.offsets, b1)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    output = grouped_mm(hidden.to(w2.dtype), w2, plan.offsets, b2)
    if getattr(module, "has_post_expert_norm", False):
        output = module.post_expert_norm(output)
    return moe_unpermute(output, plan).to(hidden_states.dtype)


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

# Implementations of one formula, as they are registered, eager as none; the others quantise or are
# chosen for a device.
_KNOWN: dict[str, Any] = {
    "eager": None,
    "grouped_mm": moe.grouped_mm_experts_forward,
    "batched_mm": moe.batched_mm_experts_forward,
    NAME: experts_forward,
}
_WATCHED = {
    name: watched_function(moe.__name__, f"{name}_experts_forward")
    for name in ("grouped_mm", "batched_mm")
}


# Class of experts -> its own gate, and what that is by its code.
_OWN_GATES: ClassTable[tuple[Any, ClampedGate | None]] = ClassTable("gate")


def known_gate(module: Any) -> Gate | None:
    """Return the formula between the products, ``None`` where the module's own must be called."""
    # Of transformers 5.23 (Muse Spark), whose eager loop applies it before the weights.
    if getattr(module, "has_post_expert_norm", False):
        return None
    if module.has_gate:
        # Of the class: Dynamo of torch 2.15 does not know a bound method's function again.
        own = module.__dict__.get("_apply_gate")
        function = type(module)._apply_gate if own is None else own
        if function is not moe._default_apply_gate:
            known, gate = _OWN_GATES.get(type(module)) or _read_gate(type(module))
            if gate is None or function is not known:
                return None
            numbers = at(module, gate.slope), at(module, gate.limit)
            if numbers != (FAST_GELU_SLOPE, LIMIT):  # those of ``moe_mlp``
                return None
            return Gate(SWIGLU_OAI, interleaved=gate.interleaved)
    activation, reason = activation_in(module, "act_fn")
    if activation is None or reason is not None or global_hooks() is not None:
        return None
    return Gate(activation, gated=bool(module.has_gate))


@torch.compiler.disable
def _read_gate(cls: type[nn.Module]) -> tuple[Any, ClampedGate | None]:
    """Keep and return the gate of a class of experts."""
    paths = symbolic.paths_of(cls, "_apply_gate")
    gate = clamped_gate_of(paths[0].result) if len(paths) == 1 and not paths[0].answers else None
    _OWN_GATES[cls] = (getattr(cls, "_apply_gate"), gate)  # noqa: B009 (no attribute of nn.Module)
    return _OWN_GATES[cls]


def _weights(module: Any) -> tuple[Any, ...]:
    """Return both weights as ``[num_experts, in, out]``, which are views, and both biases."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w1, w2 = getattr(module, name), module.down_proj
    b1 = b2 = None
    if module.has_bias:
        b1, b2 = getattr(module, f"{name}_bias"), module.down_proj_bias
    if not module.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return w1, w2, b1, b2


def _plan(module: Any, *, loop_is_known: bool) -> FusionPlan | Refusal:
    if module.down_proj is None:
        return Refusal("its weights are quantised")
    configured = module.config._experts_implementation
    if not loop_is_known and configured == "eager":
        return Refusal("its own loop is configured: experts_implementation='eager'")
    if configured not in _KNOWN:
        return Refusal(f"its experts are configured as {configured!r}")
    function = moe.ALL_EXPERTS_FUNCTIONS.get(configured)
    count = unsharded_shape(module.down_proj)[0]
    if function is not _KNOWN[configured]:
        return Refusal(f"the experts function {configured!r} was replaced by {name_of(function)}")
    if module.num_experts != count:
        return Refusal(f"it has weights for {count} experts, not {module.num_experts}")
    reason = replaced(_WATCHED[configured]) if configured in _WATCHED else None
    if reason is not None:
        return Refusal(reason)
    if known_gate(module) is not None:
        return FusionPlan(("moe_mlp",), ("act_fn",))
    return FusionPlan(("grouped_mm",), note="its own gate between two grouped_mm")


class Experts(nn.Module):
    """The forward of every patched experts module."""

    fused_rule: PatchRule

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts; families name the arguments apart."""
        if len(args) != 3 or isinstance(self.fused_rule.plan(self), Refusal):
            return super().forward(*args)
        return experts_forward(self, *args)


def experts_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class of experts that asks transformers' registry, or ``None``."""
    if not asks_registry(original):
        return None
    patched = subclass(original, Experts)
    for cls in (original, patched):
        _read_gate(cls)
    # Whether the loop in its own forward computes what the registered functions do.
    loop_is_known = known_code.known_as(original, "experts") is not None
    return PatchRule(original, patched, "O2", partial(_plan, loop_is_known=loop_is_known))


def asks_registry(cls: type[nn.Module]) -> bool:
    """Return whether ``use_experts_implementation`` has decorated a class."""
    decorator = with_inner(moe.use_experts_implementation.__code__)
    return getattr(cls.forward, "__code__", None) in [
        code for code in decorator if code.co_name == "forward"
    ]
