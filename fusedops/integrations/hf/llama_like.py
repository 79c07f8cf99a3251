"""Rules for the shapes of module that Llama gave to the families after it.

Root-mean-square norms and gated feed-forward layers stand under another name in each family's file,
equal to the letter but for a few differences, which are arguments here. A family's table makes its
rules from its own classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules import Rule, global_hooks, runs_here
from fusedops.integrations.hf.torch_modules import enough_rows, linear_obstacle
from fusedops.integrations.hf.transformers_modules import activation_name, activation_obstacle
from fusedops.ops.geglu import geglu
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.rms_norm import rms_norm
from fusedops.ops.swiglu import swiglu


class _RMSNorm(nn.Module):
    """The forward of every patched root-mean-square norm."""

    weight: torch.Tensor
    eps_name: str
    weight_offset: float
    rounding: str

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised and scaled input."""
        if not runs_here(hidden_states) or not norm_fits(self.weight, hidden_states):
            return super().forward(hidden_states)
        normed = rms_norm(hidden_states, self.weight.shape, self.weight, **norm_options(self))
        # Autocast on CUDA gives float32 where all was rounded once; these models cast it back.
        return normed.to(hidden_states.dtype) if self.rounding == "torch" else normed


def norm_fits(weight: torch.Tensor, input: torch.Tensor) -> bool:
    """Return whether the op computes what the model does for these dtypes.

    The models normalise in float32 whatever the input is, the op float64 in float64.
    """
    half = input.dtype in (torch.float16, torch.bfloat16)
    if half:
        return weight.dtype in (input.dtype, torch.float32)
    return input.dtype == weight.dtype == torch.float32


def norm_options(norm: Any) -> dict[str, Any]:
    """Return the arguments of ``rms_norm`` that a patched norm stands for."""
    return {
        "eps": getattr(norm, norm.eps_name),
        "weight_offset": norm.weight_offset,
        "rounding": norm.rounding,
    }


def rms_norm_rule(
    original: type[nn.Module],
    module_name: str,
    *,
    eps_name: str = "variance_epsilon",
    weight_offset: float = 0.0,
    rounding: str = "hf",
) -> Rule:
    """Return the rule for a family's root-mean-square norm.

    Args:
        original: the class.
        module_name: name of the module that will hold the patched class under the same name.
        eps_name: the attribute that is added to the mean square.
        weight_offset: as in ``rms_norm``.
        rounding: as in ``rms_norm``.
    """
    body = {
        "__module__": module_name,
        "__doc__": f"``{original.__module__}.{original.__name__}`` with the fused op.",
        "eps_name": eps_name,
        "weight_offset": weight_offset,
        "rounding": rounding,
    }
    patched = type(original.__name__, (_RMSNorm, original), body)
    return Rule(original, patched, ("rms_norm",), "O1", _probe_norm)


def _probe_norm(norm: Any) -> None:
    rms_norm(norm.weight.new_zeros(1, *norm.weight.shape), norm.weight.shape, norm.weight)


class _GatedMLP(nn.Module):
    """The forward of every patched gated feed-forward layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
        module: Any = self
        if not runs_here(x) or not enough_rows(x) or gated_mlp_obstacle(self) is not None:
            return super().forward(x)
        name = activation_name(module.act_fn)
        assert name is not None
        if _projections_obstacle(self) is None:
            gate, up = module.gate_proj.weight, module.up_proj.weight
            hidden = linear_glu(x, gate, up, activation=name)
        else:
            hidden = gated(module.gate_proj(x), module.up_proj(x), name)
        return module.down_proj(hidden)


GATES = ("silu", "gelu", "gelu_tanh")


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, for an activation of ``GATES``."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, "tanh" if activation == "gelu_tanh" else "none")


def gated_mlp_obstacle(module: Any) -> str | None:
    """Return why the layer must stay as it is now, or ``None``."""
    reason = activation_obstacle("act_fn", module.act_fn) or global_hooks()
    if reason is None and activation_name(module.act_fn) not in GATES:
        reason = _projections_obstacle(module)
    return reason


def _projections_obstacle(module: Any) -> str | None:
    """Return why the two projections must be called on their own, or ``None``."""
    for name in _PROJECTIONS:
        projection = getattr(module, name)
        reason = linear_obstacle(name, projection)
        if reason is None and projection.bias is not None:
            reason = f"{name} has a bias"
        if reason is not None:
            return reason
    return None


_PROJECTIONS = ("gate_proj", "up_proj")


def gated_mlp_rule(original: type[nn.Module], module_name: str) -> Rule:
    """Return the rule for a family's gated feed-forward layer.

    Where a projection must be called, because it has a bias or an adapter took its place,
    activation and product are still one op.

    Args:
        original: the class; its children are ``gate_proj``, ``up_proj``, ``down_proj`` and
            ``act_fn``.
        module_name: name of the module that will hold the patched class under the same name.
    """
    body = {
        "__module__": module_name,
        "__doc__": f"``{original.__module__}.{original.__name__}`` with the fused op.",
    }
    return Rule(
        original,
        type(original.__name__, (_GatedMLP, original), body),
        ("linear_glu",),
        "O2",
        _probe_gated_mlp,
        gated_mlp_obstacle,
        absorbs=(*_PROJECTIONS, "act_fn"),
        calls=_called_projections,
        note=_gated_mlp_note,
    )


def _called_projections(module: Any) -> tuple[str, ...]:
    return () if _projections_obstacle(module) is None else _PROJECTIONS


def _gated_mlp_note(module: Any) -> str | None:
    reason = _projections_obstacle(module)
    return None if reason is None else f"swiglu or geglu after the products: {reason}"


def _probe_gated_mlp(module: Any) -> None:
    row = next(module.parameters()).new_zeros(1, 2)
    linear_glu(row, row, row)


def by_name(rules: Iterable[Rule]) -> dict[str, type[nn.Module]]:
    """Return the patched classes of ``rules`` as the globals of the module that holds them."""
    return {rule.patched.__name__: rule.patched for rule in rules}
