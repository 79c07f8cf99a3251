"""mlp_tiled on a GPU: the kernels of linear_act, linear_glu and swiglu for a tile of rows.

The other products are torch's own matmul (cuBLAS), those of the weights' gradients with results in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.kernels import _glu, _tiles, linear_glu
from fusedops.kernels.linear_act import activation_gradient, linear
from fusedops.kernels.linear_cross_entropy import float32_product


def forward(*args: Any) -> torch.Tensor:
    return _tiles.forward(args, _layer)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return _tiles.backward(args, _tile_gradients)


def _layer(x: torch.Tensor, *args: Any) -> torch.Tensor:
    w1, b1, up_weight, w2, b2, activation = args
    if up_weight is None:
        hidden, _ = linear(x, w1, b1, activation, False)
    else:
        hidden, _, _ = linear_glu.forward(x, w1, up_weight, activation, 0.0, False)
    return F.linear(hidden, w2, b2)


def _tile_gradients(
    dy: torch.Tensor, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    w1, b1, up_weight, w2, _, activation, output_mask = args
    grad, dup, hidden = dy @ w2, None, None
    if up_weight is None:
        z, _ = linear(x, w1, b1, "identity", False)
        wants = {"wants_grad": True, "wants_bias": False, "wants_hidden": output_mask[4]}
        dz, hidden, _ = activation_gradient(grad, z, activation, **wants)
    else:
        hidden, gate, up = linear_glu.forward(x, w1, up_weight, activation, 0.0, True)
        gradients: Any = _glu.backward(grad, gate, up, (True, True), activation=activation)
        dz, dup = gradients
    grad_input = None
    if output_mask[0]:
        grad_input = dz @ w1
        if dup is not None:
            grad_input = torch.addmm(grad_input, dup, up_weight)

    def of_weight(place: int, grad: Any, input: Any) -> torch.Tensor | None:
        return float32_product(grad.t(), input) if output_mask[place] else None

    return (
        grad_input,
        of_weight(1, dz, x),
        dz.sum(0, dtype=torch.float32) if output_mask[2] else None,
        of_weight(3, dup, x),
        of_weight(4, dy, hidden),
        dy.sum(0, dtype=torch.float32) if output_mask[5] else None,
    )
