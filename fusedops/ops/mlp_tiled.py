"""The feed-forward layer of a transformer, a tile of its rows at a time.

``mlp`` calls it, and layers with a gate do. Neither forward nor backward needs more than the
intermediate activations of one tile: the backward makes those of each tile again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks, dtypes
from fusedops._core.activation import ACTIVATIONS, gradient, value
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.kernels import _tiles
from fusedops.ops.linear_act import empty_gradient

_DIFFERENTIABLE = ("input", "w1", "b1", "up_weight", "w2", "b2")


def mlp_tiled(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str,
    tile_tokens: int,
    up_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``act(x W1^T + b1) W2^T + b2``, or ``(act(x W1^T) * (x Wu^T)) W2^T + b2``.

    ``up_weight`` has the shape of ``w1`` and comes without ``b1``; all else is as in ``mlp``.
    """
    return _OP(input, w1, b1, up_weight, w2, b2, activation, tile_tokens)


def check_tile_tokens(owner: str, tile_tokens: Any, *, gate_has_bias: bool = False) -> None:
    """Raise unless ``tile_tokens`` is a number of rows, or ``None``."""
    if tile_tokens is None:
        return
    checks.integer(owner, "tile_tokens", tile_tokens, least=1)
    if gate_has_bias:
        checks.fail(owner, "tile_tokens", "None where the gate has a bias", tile_tokens)


def _reference(*args: Any) -> torch.Tensor:
    return _tiles.forward(args, _layer)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return _tiles.backward(args, _tile_gradients)


def _layer(x: torch.Tensor, *args: Any) -> torch.Tensor:
    w1, b1, up_weight, w2, b2, activation = args
    z = F.linear(x, w1, b1)
    up = None if up_weight is None else F.linear(x, up_weight)
    return F.linear(_hidden(z, up, activation), w2, b2)


def _hidden(z: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    wide = dtypes.statistics_dtype(z.dtype)
    hidden = value(z.to(wide), activation)
    return (hidden if up is None else hidden * up.to(wide)).to(z.dtype)


def _tile_gradients(
    dy: torch.Tensor, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a tile; those of the parameters are not rounded."""
    w1, b1, up_weight, w2, _, activation, output_mask = args
    wide = dtypes.statistics_dtype(x.dtype)
    z = F.linear(x, w1, b1)
    up = None if up_weight is None else F.linear(x, up_weight)
    grad = (dy @ w2).to(wide)
    factor = grad if up is None else grad * up.to(wide)
    dz = gradient(factor, z.to(wide), activation).to(x.dtype)
    dup = None if up is None else (grad * value(z.to(wide), activation)).to(x.dtype)
    grad_input = dz @ w1
    if dup is not None:
        grad_input = grad_input + dup @ up_weight

    def of_weight(place: int, grad: Any, input: torch.Tensor) -> torch.Tensor | None:
        return grad.to(wide).t() @ input.to(wide) if output_mask[place] else None

    return (
        grad_input if output_mask[0] else None,
        of_weight(1, dz, x),
        dz.sum(0, dtype=wide) if output_mask[2] else None,
        of_weight(3, dup, x),
        of_weight(4, dy, _hidden(z, up, activation)),
        dy.sum(0, dtype=wide) if output_mask[5] else None,
    )


def _shard(input: Any, b2: Any) -> list[Sharding]:
    """Shard the rows; or the hidden layer (column then row parallel), a sum where b2 is absent."""
    rules: list[Sharding] = [
        ([dim], [dim, *[REPLICATE] * 5]) for dim in (REPLICATE, *range(input.ndim - 1))
    ]
    if b2 is None:
        rules.append(([PARTIAL], [REPLICATE, 0, 0, 0, 1, REPLICATE]))
    return rules


def _shard_backward(input: Any) -> list[Sharding]:
    rules: list[Sharding] = [([REPLICATE] * 6, [REPLICATE] * 7)]
    for dim in range(input.ndim - 1):
        rules.append(([dim, *[PARTIAL] * 5], [dim, dim, *[REPLICATE] * 5]))
    rules.append(([PARTIAL, 0, 0, 0, 1, REPLICATE], [REPLICATE, REPLICATE, 0, 0, 0, 1, REPLICATE]))
    return rules


_OP = define_op(
    "mlp_tiled",
    "(Tensor input, Tensor w1, Tensor? b1, Tensor? up_weight, Tensor w2, Tensor? b2,"
    " str activation, int tile_tokens) -> (Tensor output)",
    contract={
        "input": "T [*rows, features]",
        "w1": "T [hidden, features]",
        "b1": "T [hidden]",
        "up_weight": "T [hidden, features]",
        "either": "given(b1) + given(up_weight) <= 1",
        "w2": "T [columns, hidden]",
        "b2": "T [columns]",
        "output": "T [*rows, columns]",
        "activation": tuple(ACTIVATIONS),
        "tile_tokens": "tile_tokens >= 1",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=_DIFFERENTIABLE,
        outputs=("output",),
        saves=_DIFFERENTIABLE,
        reference=_backward,
        layouts=dict.fromkeys(("w1", "up_weight", "w2"), empty_gradient),
    ),
    autocast="lower",
    triton="fusedops.kernels.mlp_tiled",
    shard=_shard,
    shard_backward=_shard_backward,
    part_of="mlp",
)
