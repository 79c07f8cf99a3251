"""The feed-forward block of a transformer: two linear layers with an activation between.

With ``recompute=True`` the backward recomputes the pre-activation: 7 matrix products in total,
where a checkpoint around the block needs 8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks
from fusedops._core.activation import ACTIVATIONS
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.ops.linear_act import (
    activate,
    activation_gradient,
    bias_gradient,
    check_layer,
    check_linear,
    empty_gradient,
    preactivation_of,
    records_graph,
    weight_gradient,
)
from fusedops.ops.mlp_tiled import check_tile_tokens, mlp_tiled


def mlp(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str = "fast_gelu",
    recompute: bool = False,
    tile_tokens: int | None = None,
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
        tile_tokens: number of rows that go through both layers at a time, for long sequences: the
            intermediate activations of no more rows exist, neither in the forward nor in the
            backward, which recomputes them. Saves what ``recompute`` saves.

    Returns:
        ``[..., out_features]``, dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit, or ``activation`` is unknown, or
            ``tile_tokens`` is less than 1.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Accumulates in float32 (float64 for float64); the hidden layer is rounded to the dtype of
        ``input`` between the products, as in eager torch. Saves ``input``, the parameters and the
        pre-activation ``z`` (not the hidden layer, which the backward computes from ``z``). With
        ``recompute`` the results are the same bits on the CPU. With ``tile_tokens`` the output is;
        the gradients of the parameters are sums over the tiles in float32 (float64 for float64),
        rounded once. Forward and backward with tiles of 1,536 rows then need 0.20 to 0.24 of the
        memory and 1.03 to 1.09 of the time of those that save ``z`` (16,384 rows, one thread of
        Zen 5; 512 and 1,024 features, 4 times as many hidden ones, float32 and bfloat16).
        Under autocast all arguments are cast, as torch does for linear.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762, section 3.3.

    Example:
        >>> import torch, fusedops
        >>> one = torch.ones(1, 1)
        >>> fusedops.mlp(torch.tensor([[3.0]]), one, None, one, one[0], activation="relu")
        tensor([[4.]])
    """
    op = "mlp"
    check_linear(op, input, w1, b1, ("w1", "b1"))
    hidden = w1.shape[0]
    shape = f"[out_features, {hidden}] (w1 has {hidden} rows)"
    check_layer(op, input, w2, b2, ("w2", "b2"), hidden, shape)
    checks.choice(op, "activation", activation, ACTIVATIONS)
    checks.flag(op, "recompute", recompute)
    check_tile_tokens(op, tile_tokens)
    if tile_tokens is not None:
        return mlp_tiled(input, w1, b1, w2, b2, activation=activation, tile_tokens=tile_tokens)
    keep = not recompute and records_graph(input, w1, b1, w2, b2)
    return _OP(input, w1, b1, w2, b2, activation, keep)[0]


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, w1, b1, w2, b2, activation, keep_preactivation = args
    preactivation = F.linear(input, w1, b1)
    output = F.linear(activate(preactivation, activation), w2, b2)
    kept = preactivation.contiguous() if keep_preactivation else input.new_empty(0)
    return output.contiguous(), kept


def _fake(
    input: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, keep_preactivation: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    leading = input.shape[:-1]
    kept = (*leading, w1.shape[0]) if keep_preactivation else (0,)
    return input.new_empty((*leading, w2.shape[0])), input.new_empty(kept)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, w1, b1, w2, _, preactivation, activation, _, output_mask = args
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


def _shard(input: Any, b2: Any, keep_preactivation: bool) -> list[Sharding]:
    """Shard the rows; or the hidden layer (column then row parallel), a sum where b2 is absent."""
    last = input.ndim - 1
    rules: list[Sharding] = [
        ([dim, dim if keep_preactivation else REPLICATE], [dim, *[REPLICATE] * 4])
        for dim in (REPLICATE, *range(last))
    ]
    if b2 is None:
        kept = last if keep_preactivation else REPLICATE
        rules.append(([PARTIAL, kept], [REPLICATE, 0, 0, 1, REPLICATE]))
    return rules


def _shard_backward(input: Any, keep_preactivation: bool) -> list[Sharding]:
    last = input.ndim - 1
    rules: list[Sharding] = [([REPLICATE] * 5, [REPLICATE] * 7)]
    for dim in range(last):
        kept = dim if keep_preactivation else REPLICATE
        rules.append(([dim, *[PARTIAL] * 4], [dim, dim, *[REPLICATE] * 4, kept]))
    kept = last if keep_preactivation else REPLICATE
    rules.append(([PARTIAL, 0, 0, 1, REPLICATE], [REPLICATE, REPLICATE, 0, 0, 1, REPLICATE, kept]))
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
        reference=_backward,
        layouts={"w1": empty_gradient, "w2": empty_gradient},
    ),
    autocast="lower",
    triton="fusedops.kernels.mlp",
    shard=_shard,
    shard_backward=_shard_backward,
)
