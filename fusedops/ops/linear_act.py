"""A linear layer and its activation in one kernel: the activation costs no pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS, gradient, value
from fusedops._core.layouts import as_matrix
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops._core.tracing import is_traced


def linear_act(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "fast_gelu",
) -> torch.Tensor:
    """Apply a linear transformation and an activation.

    ``y = act(x W^T + b)``

    Args:
        input: ``[..., in_features]``, any floating dtype, any strides.
        weight: ``[out_features, in_features]``, dtype of ``input``; may be a transposed view (a
            ``Conv1D`` weight), which is not copied.
        bias: ``[out_features]``, dtype of ``input``.
        activation: ``"fast_gelu"`` (``x * sigmoid(1.702 x)``), ``"gelu"`` (erf), ``"gelu_tanh"``,
            ``"silu"``, ``"relu"``, ``"relu2"`` or ``"identity"``.

    Returns:
        ``[..., out_features]``, dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, or ``activation`` is unknown.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64); the bias and the activation act on the
        sums, which are rounded once. On the CPU a row's result does not depend on the other rows,
        nor any result on the number of threads. Saves ``input`` (not for ``"identity"`` with a
        frozen weight), the parameters and the pre-activation (not for ``"identity"``, and not if no
        gradient is required). The weight's gradient has the memory layout of the weight. Under
        autocast all arguments are cast, as torch does for linear.

    Reference:
        Hendrycks, Gimpel: Gaussian Error Linear Units, arXiv:1606.08415.

    Example:
        >>> import torch, fusedops
        >>> weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> fusedops.linear_act(torch.tensor([[2.0, -3.0]]), weight, activation="relu")
        tensor([[2., 0.]])
    """
    checks.choice("linear_act", "activation", activation, ACTIVATIONS)
    keep = records_graph(input, weight, bias)
    return _OP(input, weight, bias, activation, keep)[0]


def _check(input: Any, weight: Any, bias: Any, *_: Any) -> None:
    check_linear("linear_act", input, weight, bias)


def check_linear(
    op: str, input: Any, weight: Any, bias: Any, names: tuple[str, str] = ("weight", "bias")
) -> None:
    """Raise unless ``weight`` and ``bias`` make a linear layer for ``input``."""
    checks.tensor(op, "input", input)
    if input.dim() == 0:
        checks.fail(op, "input", "a tensor with at least one dimension", "a scalar")
    features = input.shape[-1]
    shape = f"[out_features, {features}] (input has {features} features)"
    check_layer(op, input, weight, bias, names, features, shape)


def check_layer(
    op: str,
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    names: tuple[str, str],
    features: int,
    shape: str,
) -> None:
    """Raise unless ``weight`` and ``bias`` make a linear layer of ``features`` inputs.

    ``names`` are those of the two arguments, ``shape`` is what messages say of the weight's.
    """
    check_parameter(op, names[0], weight, input)
    if weight.dim() != 2 or weight.shape[1] != features:
        checks.fail(op, names[0], f"of shape {shape}", list(weight.shape))
    if bias is not None:
        check_parameter(op, names[1], bias, input)
        checks.shape(op, names[1], bias, weight.shape[:1], f"the rows of {names[0]}")


def check_parameter(op: str, name: str, value: Any, input: torch.Tensor) -> None:
    """Raise unless ``value`` has the device of ``input``, and its dtype (autocast may cast)."""
    if checks.alike(value, input.dtype, input.device):
        return
    same = dtypes.autocast_dtype(input.device) is None
    checks.like(op, name, value, "input", input, dtype=same)


def records_graph(*tensors: torch.Tensor | None) -> bool:
    """Return whether a graph is being recorded through one of ``tensors``.

    Not while ``torch.jit.trace`` runs, whose graph is used both with gradients and, in its own
    check, without. The backward recomputes tensors that are not saved.
    """
    if is_traced():
        return False
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def activate(preactivation: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply the activation in accumulation dtype and round once."""
    wide = preactivation.to(dtypes.statistics_dtype(preactivation.dtype))
    return value(wide, activation).to(preactivation.dtype)


def activation_gradient(
    grad: torch.Tensor, preactivation: torch.Tensor, activation: str
) -> torch.Tensor:
    """Return ``grad * act'(preactivation)`` in the dtype of ``grad``."""
    if activation == "identity":
        return grad
    wide = dtypes.statistics_dtype(grad.dtype)
    return gradient(grad.to(wide), preactivation.to(wide), activation).to(grad.dtype)


def is_transposed(matrices: torch.Tensor) -> bool:
    """Return whether matrices are transposed views of dense ones: so is the gradient then."""
    return not matrices.is_contiguous() and matrices.mT.is_contiguous()


def weight_gradient(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``grad^T input`` over all rows, laid out as ``weight`` is."""
    grad, input = as_matrix(grad), as_matrix(input)
    if is_transposed(weight):
        return (input.t() @ grad).contiguous().t()
    return (grad.t() @ input).contiguous()


def empty_gradient(matrices: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty tensor in the layout that the gradient of ``matrices`` has."""
    if is_transposed(matrices):
        return matrices.new_empty(matrices.mT.shape, dtype=dtype).mT
    return matrices.new_empty(matrices.shape, dtype=dtype)


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``grad`` over its rows, accumulated wide and rounded once."""
    wide = dtypes.statistics_dtype(grad.dtype)
    return as_matrix(grad).sum(0, dtype=wide).to(grad.dtype)


def preactivation_of(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kept: torch.Tensor
) -> torch.Tensor:
    """Return the saved pre-activation, or recompute it.

    For a second derivative it is always recomputed, as a function of the inputs.
    """
    if torch.is_grad_enabled() or kept.numel() == 0:
        return F.linear(input, weight, bias)
    return kept


def _keeps(activation: str, keep_preactivation: bool) -> bool:
    return keep_preactivation and activation != "identity"


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, weight, bias, activation, keep_preactivation = args
    preactivation = F.linear(input, weight, bias)
    if activation == "identity":
        return preactivation.contiguous(), input.new_empty(0)
    output = activate(preactivation, activation).contiguous()
    return output, preactivation.contiguous() if keep_preactivation else input.new_empty(0)


def _fake(
    input: torch.Tensor, weight: torch.Tensor, activation: str, keep_preactivation: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*input.shape[:-1], weight.shape[0])
    kept = shape if _keeps(activation, keep_preactivation) else (0,)
    return input.new_empty(shape), input.new_empty(kept)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, weight, bias, preactivation, activation, _, output_mask = args
    grad = grad_output
    if activation != "identity":
        z = preactivation_of(input, weight, bias, preactivation)
        grad = activation_gradient(grad_output, z, activation)
    return (
        (grad @ weight).contiguous() if output_mask[0] else None,
        weight_gradient(grad, input, weight) if output_mask[1] else None,
        bias_gradient(grad) if output_mask[2] else None,
    )


def _shard(input: Any, bias: Any, activation: str, keep_preactivation: bool) -> list[Sharding]:
    """Shard the rows; or the outputs (column parallel); or, when it is linear, the sum."""
    last = input.ndim - 1
    keeps = _keeps(activation, keep_preactivation)
    rules: list[Sharding] = [
        ([dim, dim if keeps else REPLICATE], [dim, REPLICATE, REPLICATE])
        for dim in (REPLICATE, *range(last))
    ]
    rules.append(([last, last if keeps else REPLICATE], [REPLICATE, 0, 0]))
    if activation == "identity" and bias is None:
        rules.append(([PARTIAL, REPLICATE], [last, 1, REPLICATE]))
    return rules


def _shard_backward(input: Any, activation: str, keep_preactivation: bool) -> list[Sharding]:
    last = input.ndim - 1
    keeps = _keeps(activation, keep_preactivation)
    rules: list[Sharding] = [([REPLICATE] * 3, [REPLICATE] * 5)]
    for dim in range(last):
        kept = dim if keeps else REPLICATE
        rules.append(([dim, PARTIAL, PARTIAL], [dim, dim, REPLICATE, REPLICATE, kept]))
    kept = last if keeps else REPLICATE
    rules.append(([PARTIAL, 0, 0], [last, REPLICATE, 0, 0, kept]))
    if activation == "identity":
        rules.append(([last, 1, REPLICATE], [REPLICATE, last, 1, REPLICATE, REPLICATE]))
    return rules


_OP = define_op(
    "linear_act",
    "(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep_preactivation)"
    " -> (Tensor output, Tensor preactivation)",
    contract={
        "input": "T [*rows, features]",
        "weight": "T [columns, features]",
        "bias": "T [columns]",
        "output": "T [*rows, columns]",
        "preactivation": "T [*rows, columns] | [0]",
        "activation": tuple(ACTIVATIONS),
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "weight", "bias"),
        outputs=("output",),
        saves=("input", "weight", "bias", "preactivation"),
        shape_only=("input", "weight", "activation", "identity"),
        reference=_backward,
        layouts={"weight": empty_gradient},
    ),
    autocast="lower",
    triton="fusedops.kernels.linear_act",
    shard=_shard,
    shard_backward=_shard_backward,
    check=_check,
)
