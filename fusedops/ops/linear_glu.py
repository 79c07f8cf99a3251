"""A gated linear unit with both products in one kernel: the gate costs no pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS, gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.ops.linear_act import (
    check_linear,
    check_parameter,
    empty_gradient,
    preactivation_of,
    records_graph,
    weight_gradient,
)


def linear_glu(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    """Apply two linear transformations and multiply one, activated, by the other.

    ``y = act(x Wg^T) * (x Wu^T)``

    Args:
        input: ``[..., in_features]``, any floating dtype, any strides.
        gate_weight: ``[out_features, in_features]``, dtype of ``input``; may be a transposed view,
            which is not copied.
        up_weight: ``[out_features, in_features]``, the same.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (erf) or ``"gelu_tanh"`` (GeGLU),
            ``"fast_gelu"`` (``x * sigmoid(1.702 x)``), ``"relu"`` (ReGLU), ``"relu2"`` or
            ``"identity"`` (bilinear).
        limit: bound of the products, as in DeepSeek-V4: the first is at most ``limit``, the second
            between ``-limit`` and ``limit``. A bounded product gets no gradient.

    Returns:
        ``[..., out_features]``, dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, ``activation`` is unknown, or ``limit`` is not
            positive and finite.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64); activation and product act on the
        sums, and the result is rounded once. On the CPU a row's result does not depend on the other
        rows, nor any result on the number of threads; there the gradient of ``input``, a sum of two
        products, is rounded once as well. Saves ``input``, the weights and the two pre-activations
        (not if no gradient is required). Under autocast all arguments are cast, as torch does for
        linear.

    Reference:
        Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Example:
        >>> import torch, fusedops
        >>> gate, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> fusedops.linear_glu(torch.tensor([[2.0, 3.0]]), gate, up, activation="relu")
        tensor([[6.]])
    """
    checks.choice("linear_glu", "activation", activation, ACTIVATIONS)
    if limit is not None:
        checks.positive("linear_glu", "limit", limit)
    keep = records_graph(input, gate_weight, up_weight)
    bound = 0.0 if limit is None else float(limit)
    return _OP(input, gate_weight, up_weight, activation, bound, keep)[0]


def _check(input: Any, gate_weight: Any, up_weight: Any, *_: Any) -> None:
    op = "linear_glu"
    check_linear(op, input, gate_weight, None, ("gate_weight", ""))
    check_parameter(op, "up_weight", up_weight, input)
    checks.shape(op, "up_weight", up_weight, gate_weight.shape, "that of gate_weight")


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input, gate_weight, up_weight, activation, limit, keep_preactivations = args
    gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
    wide = dtypes.statistics_dtype(input.dtype)
    inner, factor = bounded(gate.to(wide), up.to(wide), limit)
    output = (value(inner, activation) * factor).to(input.dtype)
    if keep_preactivations:
        return output.contiguous(), gate.contiguous(), up.contiguous()
    return output.contiguous(), input.new_empty(0), input.new_empty(0)


def bounded(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products within their bounds."""
    return (gate, up) if limit == 0 else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _fake(
    input: torch.Tensor, gate_weight: torch.Tensor, keep_preactivations: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*input.shape[:-1], gate_weight.shape[0])
    kept = shape if keep_preactivations else (0,)
    return input.new_empty(shape), input.new_empty(kept), input.new_empty(kept)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, gate_weight, up_weight, gate, up, activation, limit, _, output_mask = args
    dtype, wide = grad_output.dtype, dtypes.statistics_dtype(grad_output.dtype)
    gate = preactivation_of(input, gate_weight, None, gate).to(wide)
    up = preactivation_of(input, up_weight, None, up).to(wide)
    grad, (inner, factor) = grad_output.to(wide), bounded(gate, up, limit)
    grad_gate = gradient(grad * factor, inner, activation).to(dtype)
    grad_up = (grad * value(inner, activation)).to(dtype)
    if limit != 0:  # 0 also of NaN, as the gradient of torch's clamp
        grad_gate = torch.where(gate <= limit, grad_gate, 0.0)
        grad_up = torch.where(up.abs() <= limit, grad_up, 0.0)
    grad_input = None
    if output_mask[0]:
        grad_input = (grad_gate @ gate_weight + grad_up @ up_weight).contiguous()
    return (
        grad_input,
        weight_gradient(grad_gate, input, gate_weight) if output_mask[1] else None,
        weight_gradient(grad_up, input, up_weight) if output_mask[2] else None,
    )


def _shard(input: Any, keep_preactivations: bool) -> list[Sharding]:
    """Shard the rows; or the outputs (column parallel)."""
    last = input.ndim - 1
    rules: list[Sharding] = []
    for dim in (REPLICATE, *range(last + 1)):
        kept = dim if keep_preactivations else REPLICATE
        inputs: list[Placement] = [REPLICATE, 0, 0] if dim == last else [dim, REPLICATE, REPLICATE]
        rules.append(([dim, kept, kept], inputs))
    return rules


_OP = define_op(
    "linear_glu",
    "(Tensor input, Tensor gate_weight, Tensor up_weight, str activation, float limit,"
    " bool keep_preactivations) -> (Tensor output, Tensor gate, Tensor up)",
    contract={
        "input": "T [*rows, features]",
        "gate_weight, up_weight": "T [columns, features]",
        "output": "T [*rows, columns]",
        "gate, up": "T [*rows, columns] | [0]",
        "activation": tuple(ACTIVATIONS),
        "limit": "0 <= limit < inf",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "gate_weight", "up_weight"),
        outputs=("output",),
        saves=("input", "gate_weight", "up_weight", "gate", "up"),
        reference=_backward,
        layouts={"gate_weight": empty_gradient, "up_weight": empty_gradient},
    ),
    autocast="lower",
    triton="fusedops.kernels.linear_glu",
    shard=_shard,
    check=_check,
)
