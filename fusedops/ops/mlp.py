"""The feed-forward block of a transformer: two linear layers with an activation between.

    z = x W1^T + b1,   h = act(z),   y = h W2^T + b2

Of the hidden layer only ``z`` is saved for the backward. With ``recompute=True`` nothing is saved:
the backward recomputes ``z``, with 7 matrix products in total, where a checkpoint around the block
needs 8. Kernels: those of ``linear_act`` (``csrc/cpu/product/mlp.cpp``, ``kernels/mlp.py``). This
file has the public function, the specification and the registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement
from fusedops.ops.linear_act import (
    activate,
    activation_gradient,
    bias_gradient,
    check_linear,
    check_parameter,
    empty_weight_gradient,
    preactivation_of,
    wants_gradient,
    weight_gradient,
)


def mlp(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str = "fast_gelu",
    recompute: bool = False,
) -> torch.Tensor:
    """Apply two linear layers with an activation between.

    ``y = act(x W1^T + b1) W2^T + b2``

    Args:
        input: ``[..., in_features]``, any floating dtype, any strides.
        w1: ``[hidden_features, in_features]``, dtype of ``input``; may be a transposed view.
        b1: ``[hidden_features]``, or ``None``.
        w2: ``[out_features, hidden_features]``; may be a transposed view.
        b2: ``[out_features]``, or ``None``.
        activation: as for ``linear_act``.
        recompute: save only the input and the parameters for the backward, which then computes one
            more matrix product.

    Returns:
        ``[..., out_features]``, dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, or ``activation`` is unknown.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Accumulates in float32 (float64 for float64); the hidden layer is rounded to the dtype of
        ``input`` between the products, as in eager torch. Saves ``input``, the parameters and the
        pre-activation ``z`` (not the hidden layer, which the backward computes from ``z``). With
        ``recompute`` the results are the same bits on the CPU. Backends: cpp, triton, torch. Under
        autocast all arguments are cast, as torch does for linear.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762, section 3.3.

    Example:
        >>> import torch, fusedops
        >>> one = torch.ones(1, 1)
        >>> fusedops.mlp(torch.tensor([[3.0]]), one, None, one, one[0], activation="relu")
        tensor([[4.]])
    """
    op = "mlp"
    _check(op, input, w1, b1, w2, b2)
    checks.choice(op, "activation", activation, ACTIVATIONS)
    checks.flag(op, "recompute", recompute)
    keep = not recompute and wants_gradient(input, w1, b1, w2, b2)
    return _OP(input, w1, b1, w2, b2, activation, keep)[0]


def _check(op: str, input: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> None:
    check_linear(op, input, w1, b1, ("w1", "b1"))
    check_parameter(op, "w2", w2, input)
    hidden = w1.shape[0]
    if w2.dim() != 2 or w2.shape[1] != hidden:
        wanted = f"of shape [out_features, {hidden}] (w1 has {hidden} rows)"
        checks.fail(op, "w2", wanted, list(w2.shape))
    if b2 is not None:
        check_parameter(op, "b2", b2, input)
        checks.shape(op, "b2", b2, w2.shape[:1], "the rows of w2")


def _reference(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    keep_preactivation: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    preactivation = F.linear(input, w1, b1)
    output = F.linear(activate(preactivation, activation), w2, b2)
    kept = preactivation.contiguous() if keep_preactivation else input.new_empty(0)
    return output.contiguous(), kept


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, w1, _, w2, *_, keep_preactivation = args
    leading = input.shape[:-1]
    kept = (*leading, w1.shape[0]) if keep_preactivation else (0,)
    return input.new_empty((*leading, w2.shape[0])), input.new_empty(kept)


def _backward_reference(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    preactivation: torch.Tensor,
    activation: str,
    keep_preactivation: bool,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    z = preactivation_of(input, w1, b1, preactivation)
    grad_input = grad_w1 = grad_b1 = grad_w2 = grad_b2 = None
    if any(output_mask[:3]):
        grad = activation_gradient(grad_output @ w2, z, activation)
        grad_input = (grad @ w1).contiguous() if output_mask[0] else None
        grad_w1 = weight_gradient(grad, input, w1) if output_mask[1] else None
        grad_b1 = bias_gradient(grad) if output_mask[2] else None
    if output_mask[3]:
        grad_w2 = weight_gradient(grad_output, activate(z, activation), w2)
    if output_mask[4]:
        grad_b2 = bias_gradient(grad_output)
    return grad_input, grad_w1, grad_b1, grad_w2, grad_b2


def _backward_fake(*args: Any) -> tuple[torch.Tensor | None, ...]:
    _, input, w1, _, w2, *_, output_mask = args
    return (
        input.new_empty(input.shape) if output_mask[0] else None,
        empty_weight_gradient(w1) if output_mask[1] else None,
        w1.new_empty(w1.shape[0]) if output_mask[2] else None,
        empty_weight_gradient(w2) if output_mask[3] else None,
        w2.new_empty(w2.shape[0]) if output_mask[4] else None,
    )


def _shard(
    input: Any, w1: Any, b1: Any, w2: Any, b2: Any, activation: str, keep_preactivation: bool
) -> list[tuple[list[Placement], list[Placement]]]:
    """Shard the rows; or the hidden layer (column then row parallel), a sum where b2 is absent."""
    last = input.ndim - 1
    first_bias, second_bias = b1 is not None, b2 is not None
    words: list[Placement] = [REPLICATE, *range(last)]
    rules = []
    for word in words:
        kept = word if keep_preactivation else REPLICATE
        biases = [REPLICATE if each else None for each in (first_bias, second_bias)]
        inputs = [word, REPLICATE, biases[0], REPLICATE, biases[1], None, None]
        rules.append(([word, kept], inputs))
    if not second_bias:
        kept = last if keep_preactivation else REPLICATE
        inputs = [REPLICATE, 0, 0 if first_bias else None, 1, None, None, None]
        rules.append(([PARTIAL, kept], inputs))
    return rules


def _shard_backward(*args: Any) -> list[tuple[list[Placement], list[Placement]]]:
    _, input, _, b1, _, b2, *_, keep_preactivation, output_mask = args
    last = input.ndim - 1
    biases: list[Placement] = [REPLICATE if each is not None else None for each in (b1, b2)]

    def masked(*results: Placement) -> list[Placement]:
        return [each if on else None for each, on in zip(results, output_mask, strict=True)]

    rules = []
    words: list[Placement] = [REPLICATE, *range(last)]
    for word in words:
        summed = REPLICATE if word == REPLICATE else PARTIAL
        kept = word if keep_preactivation else REPLICATE
        inputs = [word, word, REPLICATE, biases[0], REPLICATE, biases[1], kept, None, None, None]
        rules.append((masked(word, summed, summed, summed, summed), inputs))
    kept = last if keep_preactivation else REPLICATE
    first = 0 if b1 is not None else None
    inputs = [REPLICATE, REPLICATE, 0, first, 1, biases[1], kept, None, None, None]
    rules.append((masked(PARTIAL, 0, 0, 1, REPLICATE), inputs))
    return rules


_OP = define_op(
    "mlp",
    "(Tensor input, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation,"
    " bool keep_preactivation) -> (Tensor output, Tensor preactivation)",
    contract={
        "input": "T [*rows, features]",
        "w1": "T [hidden, features]",
        "b1": "T [hidden]",
        "w2": "T [columns, hidden]",
        "b2": "T [columns]",
        "output": "T [*rows, columns]",
        "preactivation": "T [*rows, hidden] | [0]",
        "activation": tuple(ACTIVATIONS),
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "w1", "b1", "w2", "b2"),
        outputs=("output",),
        saves=("input", "w1", "b1", "w2", "b2", "preactivation"),
        reference=_backward_reference,
        fake=_backward_fake,
    ),
    autocast="lower",
    triton="fusedops.kernels.mlp",
    shard=_shard,
    shard_backward=_shard_backward,
)
