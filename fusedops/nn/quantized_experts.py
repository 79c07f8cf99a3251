"""``QuantizedExperts``: the experts of a mixture with frozen weights of 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.nn._arguments import shown
from fusedops.nn.quantized_linear import FrozenCodes, check_group
from fusedops.ops import _quantized_weights as packed
from fusedops.ops._moe_gate import hidden_of
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.moe_permute import moe_permute
from fusedops.ops.moe_unpermute import moe_unpermute
from fusedops.ops.quantized_linear import OPERATOR


class _Weights(FrozenCodes):
    """Matrices ``[experts, out, in]`` as codes and scales; arguments as of ``QuantizedLinear``."""

    qweight: torch.Tensor

    def __init__(self, weight: torch.Tensor, format: str, group: int) -> None:
        super().__init__()
        self.num_experts, self.out_features, self.in_features = weight.shape
        self.format, self.group = format, group
        if weight.device.type != "meta" and not bool(weight.isfinite().all()):
            checks.fail("QuantizedExperts", "experts", "finite weights", "NaN or infinities")
        codes, scales = [], []
        for matrix in weight.detach():
            values = packed.quantize(matrix, format, group, torch.bfloat16)
            codes.append(packed.pack(values[0], format))
            scales.append(packed.pack_scales(values[1]))
        self.register_buffer("qweight", torch.stack(codes))
        self.register_buffer("scales", torch.stack(scales))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights, ``[experts, out_features, in_features]``."""
        matrices = [
            packed.dequantize(
                codes,
                scales,
                in_features=self.in_features,
                out_features=self.out_features,
                format=self.format,
                group=self.group,
                dtype=dtype,
            )
            for codes, scales in zip(self.qweight, self.scales, strict=True)
        ]
        return torch.stack(matrices)

    def forward(self, rows: torch.Tensor, ends: list[int], bias: Any) -> torch.Tensor:
        """Return the products of rows that are sorted by expert; those past the last end are 0."""
        scales = self.scales.double() if rows.dtype == torch.float64 else self.scales
        sizes = self.in_features, self.out_features, self.format, self.group
        parts = []
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < end:
                added = None if bias is None else bias[expert]
                weight = self.qweight[expert], scales[expert]
                parts.append(OPERATOR(rows[begin:end], *weight, added, *sizes))
        parts.append(rows.new_zeros(len(rows) - (ends[-1] if ends else 0), self.out_features))
        return torch.cat(parts)

    def extra_repr(self) -> str:
        """Return sizes, format and group."""
        return shown(self, "num_experts", "in_features", "out_features", "format", "group")


class QuantizedExperts(nn.Module):
    """Experts whose weights are quantised and frozen; biases stay parameters.

    It replaces the ``experts`` of ``fusedops.nn.MoE``, or of a model of transformers, and is called
    as they are: ``(input, plan)``, or ``(hidden_states, top_k_index, top_k_weights)``.

    Args:
        experts: those modules; the weights leave them, and their biases and gate stay in use.
        format: of ``QuantizedLinear``.
        group: of ``QuantizedLinear``.

    Raises:
        ValueError: ``format`` is unknown, ``group`` is no multiple of 8, or a weight is not finite.
        TypeError: ``experts`` is neither.

    Note:
        Each expert is one call of ``quantized_linear``, for which the host waits for the routing.
    """

    def __init__(self, experts: Any, *, format: str = "int4", group: int = 128) -> None:
        super().__init__()
        checks.choice("QuantizedExperts", "format", format, packed.FORMATS)
        check_group("QuantizedExperts", group)
        reason = obstacle(experts)
        if reason is not None:
            raise TypeError(f"QuantizedExperts: experts cannot be taken: {reason}")
        self.first_name = first_of(experts)
        weights = [getattr(experts, name) for name in (self.first_name, "down_proj")]
        self.num_experts = len(weights[0])
        own = hasattr(experts, "form")
        self.transposed = bool(experts.transposed if own else experts.is_transposed)
        if self.transposed:
            weights = [weight.transpose(1, 2) for weight in weights]
        self.first, self.down = (_Weights(weight, format, group) for weight in weights)
        for name in (self.first_name, "down_proj"):
            experts.register_parameter(name, None)
        self.gate = experts
        self.train(experts.training)

    def forward(self, input: torch.Tensor, *routing: Any) -> torch.Tensor:
        """Return the weighted sum of each token's experts, ``[tokens, hidden_size]``."""
        plan = routing[0]
        if not isinstance(plan, RoutingPlan):
            expert_ids, probs = routing
            plan = RoutingPlan.from_choices(expert_ids, probs, self.num_experts)
        rows = moe_permute(input, plan)
        ends = [int(end) for end in plan.offsets]  # not tolist: a recorded step must see it
        hidden = self.first(rows, ends, getattr(self.gate, f"{self.first_name}_bias", None))
        output = self.down(self._activate(hidden), ends, getattr(self.gate, "down_proj_bias", None))
        return moe_unpermute(output, plan).to(input.dtype)

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        gate: Any = self.gate
        if hasattr(gate, "form"):
            return hidden_of(hidden, **gate.form).to(hidden.dtype)
        activated: torch.Tensor = gate._apply_gate(hidden) if gate.has_gate else gate.act_fn(hidden)
        return activated


def first_of(experts: Any) -> str:
    """Return the name of the first weight of experts."""
    return "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"


def obstacle(experts: Any) -> str | None:
    """Return why a module cannot become ``QuantizedExperts``, or ``None``."""
    cls = type(experts).__name__
    weights = [getattr(experts, name, None) for name in (first_of(experts), "down_proj")]
    if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights):
        return f"a {cls} has no weights of three dimensions"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return "sharded"
    if hasattr(experts, "form"):
        return None if experts.stored is None else "its weights are stored elsewhere"
    # What transformers' ``use_experts_implementation`` sets.
    if not all(hasattr(experts, name) for name in ("has_gate", "is_transposed", "_apply_gate")):
        return f"a {cls} computes in its own way"
    has_norm = getattr(experts, "has_post_expert_norm", False)
    return "a norm follows each expert" if has_norm else None
