"""mlp on a GPU: the product with the activation is linear_act's kernel; the others are plain.

Backward: the gradient of the hidden layer is a plain product; one pass then makes the gradient of
the pre-activation, the hidden layer itself and the gradient of the first bias. If the
pre-activation was not saved, one more product recomputes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.layouts import as_matrix
from fusedops.kernels.linear_act import activation_gradient, linear, weight_gradient


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, w1, b1, w2, b2, activation, keep_preactivation = args
    keeps = keep_preactivation and activation != "identity"
    hidden, kept = linear(input, w1, b1, activation, keeps)
    output = F.linear(hidden, w2, b2).contiguous()
    return output, hidden if keep_preactivation and not keeps else kept


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, w1, b1, w2, b2, preactivation, activation, _, output_mask = args
    dy = as_matrix(grad_output.contiguous())
    x = as_matrix(input)
    grad_input = grad_w1 = grad_b1 = grad_w2 = grad_b2 = None
    if any(output_mask[:4]):
        kept = preactivation
        if kept.numel() == 0:
            kept, _ = linear(input, w1, b1, "identity", False)
        wants = {"wants_grad": output_mask[0] or output_mask[1], "wants_bias": output_mask[2]}
        wants["wants_hidden"] = output_mask[3]
        dz, hidden, grad_b1 = activation_gradient(dy @ w2, kept, activation, **wants)
        if output_mask[3]:
            assert hidden is not None
            grad_w2 = weight_gradient(dy, hidden, w2)
        grad_input = (dz @ w1).reshape(input.shape) if output_mask[0] else None
        grad_w1 = weight_gradient(dz, x, w1) if output_mask[1] else None
    if output_mask[4]:
        _, _, grad_b2 = activation_gradient(dy, dy, "identity", wants_grad=False, wants_bias=True)
    return grad_input, grad_w1, grad_b1, grad_w2, grad_b2
