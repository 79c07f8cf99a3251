"""RMS norm of rows, or of groups in them, with a gate before or after it, as in hybrid models."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.activation import gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding, of_gradient
from fusedops.ops import _norm_math

GATE_ACTIVATIONS = ("silu", "sigmoid")


def gated_rms_norm(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    norm_before_gate: bool = True,
    groups: int = 1,
    gate_activation: str = "silu",
) -> torch.Tensor:
    """Divide by the root mean square over the last dimension, scale, and multiply by a gate.

    ``y = norm(x) * weight * act(gate)``, or ``norm(x * act(gate)) * weight`` with the gate first,
    where ``norm(x) = x / sqrt(E[x^2] + eps)``. ``fusedops.rms_norm(..., gate=gate)`` is the same.

    Args:
        input: ``[..., columns]``, any floating dtype; evenly spaced rows are not copied.
        gate: shape and dtype of ``input``; evenly spaced rows are not copied.
        weight: ``[columns]``, dtype of ``input``; for an ``input`` in half precision also float32.
        eps: added to the mean square; ``None`` is, as in torch, the ``eps`` of float32 (of float64
            for float64).
        norm_before_gate: ``True`` multiplies the normalised rows by the gate (Qwen3-Next, Kimi
            Linear), ``False`` normalises the gated rows (Mamba-2, Zamba2).
        groups: number of equal parts of a row that are normalised separately.
        gate_activation: ``"silu"`` or ``"sigmoid"``.

    Returns:
        Shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, ``groups`` does not divide the columns, or
            ``gate_activation`` is unknown.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once, where models in
        half precision also round the normalised rows before the weight. A row's result does not
        depend on the other rows; the weight's gradient is summed in a fixed order: the same bits
        for any number of threads. Saves ``input``, ``gate``, ``weight`` and one number per group of
        each row. Autocast does not change the call.

    Reference:
        Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467. Dao, Gu:
        Transformers are SSMs, arXiv:2405.21060.

    Example:
        >>> import torch, fusedops
        >>> x, gate = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.ones(1, 4)
        >>> fusedops.gated_rms_norm(x, gate, eps=0.0, gate_activation="sigmoid")
        tensor([[0.8773, 1.1697, 0.0000, 0.0000]])
    """
    return call(
        "gated_rms_norm", input, gate, weight, eps, norm_before_gate, groups, gate_activation
    )


def call(
    op: str,
    input: Any,
    gate: Any,
    weight: Any,
    eps: Any,
    norm_before_gate: Any,
    groups: Any,
    gate_activation: Any,
) -> torch.Tensor:
    """Check the arguments, with messages that begin with ``op``, and call the operator."""
    checks.tensor(op, "input", input)
    if input.dim() == 0:
        checks.fail(op, "input", "a tensor with at least one dimension", "a scalar")
    checked_eps = 0.0 if eps is None else eps
    _norm_math.check(op, "input", input, input.shape[-1:], weight, None, checked_eps)
    checks.like(op, "gate", gate, "input", input, dtype=True)
    checks.shape(op, "gate", gate, input.shape, "that of input")
    check_options(op, input, norm_before_gate, groups, gate_activation)
    eps = _norm_math.default_eps(input, eps)
    return _OP(input, gate, weight, groups, eps, norm_before_gate, gate_activation)[0]


def check_options(
    op: str, input: torch.Tensor, norm_before_gate: Any, groups: Any, gate_activation: Any
) -> None:
    """Raise unless the options of a gated norm are right, with messages that begin with ``op``."""
    checks.flag(op, "norm_before_gate", norm_before_gate)
    checks.integer(op, "groups", groups, least=1)
    if input.shape[-1] % groups:
        checks.fail(op, "groups", f"a divisor of {input.shape[-1]}, the last size", groups)
    checks.choice(op, "gate_activation", gate_activation, GATE_ACTIVATIONS)


def _grouped(
    input: torch.Tensor, weight: torch.Tensor | None, groups: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows ``[..., groups, size]`` and weight ``[groups, size]`` in the wide dtype."""
    wide, size = dtypes.statistics_dtype(input.dtype), input.shape[-1] // groups
    rows = input.to(wide).reshape(*input.shape[:-1], groups, size)
    return rows, None if weight is None else weight.to(wide).reshape(groups, size)


def _gate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.sigmoid(gate) if activation == "sigmoid" else value(gate, activation)


def _gate_gradient(grad: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "sigmoid":
        return grad * torch.sigmoid(gate) * torch.sigmoid(-gate)
    return gradient(grad, gate, activation)


def _reference(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    norm_before_gate: bool,
    gate_activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, factor = _grouped(input, weight, groups)
    opened = _gate(_grouped(gate, None, groups)[0], gate_activation)
    normalized = _norm_math.normalize_rms(x if norm_before_gate else x * opened, x.shape[-1:], eps)
    output = _norm_math.affine(normalized.values, factor, None)
    output = output * opened if norm_before_gate else output
    shaped = output.to(input.dtype).reshape(input.shape).contiguous()
    return shaped, normalized.rstd.squeeze(-1)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, gate, weight, _, groups, eps, norm_before_gate, activation, mask = args
    x, factor = _grouped(input, weight, groups)
    g, grad = (_grouped(tensor, None, groups)[0] for tensor in (gate, grad_output))
    opened = _gate(g, activation)
    row = x.shape[-1:]
    normalized = _norm_math.normalize_rms(x if norm_before_gate else x * opened, row, eps)
    of_norm = grad * opened if norm_before_gate else grad
    of_rows = _norm_math.input_gradient(of_norm, normalized, factor, row)
    grad_input, grad_opened = of_rows, grad * _norm_math.affine(normalized.values, factor, None)
    if not norm_before_gate:
        grad_input, grad_opened = of_rows * opened, of_rows * x
    gradients: list[torch.Tensor | None] = [None, None, None]
    if mask[0]:
        gradients[0] = grad_input.reshape(input.shape).to(input.dtype).contiguous()
    if mask[1]:
        of_gate = _gate_gradient(grad_opened, g, activation)
        gradients[1] = of_gate.reshape(input.shape).to(input.dtype).contiguous()
    if mask[2]:
        of_weight = (of_norm * normalized.values).sum_to_size(x.shape[-2:])
        gradients[2] = of_weight.reshape(weight.shape).to(weight.dtype)
    return tuple(gradients)


def _shard(input: Any) -> list[Sharding]:
    """Rows are independent: any leading dim may be sharded, the weight is replicated."""
    places = (REPLICATE, *range(input.ndim - 1))
    return [([dim, dim], [dim, dim, REPLICATE]) for dim in places]


def _shard_backward(input: Any) -> list[Sharding]:
    """With rows sharded, each rank has a part of the sum that is the weight's gradient."""
    shardings: list[Sharding] = []
    for dim in (REPLICATE, *range(input.ndim - 1)):
        partial = of_gradient(REPLICATE, sharded=dim != REPLICATE)
        shardings.append(([dim, dim, partial], [dim, dim, dim, REPLICATE, dim]))
    return shardings


_OP = define_op(
    "gated_rms_norm",
    "(Tensor input, Tensor gate, Tensor? weight, int groups, float eps, bool norm_before_gate, "
    "str gate_activation) -> (Tensor output, Tensor rstd)",
    contract={
        "input, gate, output": "T [*rows, columns]",
        "weight": "param(T) [columns]",
        "groups": "groups >= 1",
        "columns of groups": "columns % groups == 0",
        "rstd": "stat(T) [*rows, groups]",
        "gate_activation": GATE_ACTIVATIONS,
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "gate", "weight"),
        outputs=("output",),
        saves=("input", "gate", "weight", "rstd"),
        reference=_backward,
    ),
    triton="fusedops.kernels.gated_rms_norm",
    shard=_shard,
    shard_backward=_shard_backward,
)
