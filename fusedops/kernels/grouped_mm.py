"""grouped_mm in Triton: launchers of the kernels in ``_grouped.py``.

Backward: one pass makes the gradient of the pre-activation; the input's gradient is the forward
kernel with the transposed weights, the weights' a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _grouped
from fusedops.kernels._arguments import GroupedArguments, of_backward
from fusedops.kernels.linear_act import activation_gradient

_MAX_GROUPS = 4096


def supports(input: torch.Tensor, weight: torch.Tensor, *_: Any) -> str | None:
    if weight.shape[0] > _MAX_GROUPS:
        return f"at most {_MAX_GROUPS} groups, got {weight.shape[0]}"
    return None


def supports_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: Any
) -> str | None:
    return supports(input, weight)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = GroupedArguments(*args)
    input, weight, offsets, bias, activation, _ = call
    return _grouped.product(input, weight, offsets, bias, activation, keeps=call.keeps)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad,), call, (kept,), output_mask = of_backward(GroupedArguments, args)
    return gradients(grad, call, kept, output_mask)


def gradients(
    grad: torch.Tensor,
    call: GroupedArguments,
    kept: torch.Tensor,
    output_mask: Sequence[bool],
    into: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor | None, ...]:
    """Return those that are asked for; weight's and bias's are added to what is given."""
    into_weight, into_bias = into
    input, weight, offsets, bias, activation, _ = call
    dz = grad.contiguous()
    if activation != "identity":
        if kept.numel() == 0:
            kept, _ = _grouped.product(input, weight, offsets, bias)
        dz, _, _ = activation_gradient(dz, kept, activation, wants_grad=True, wants_bias=False)
    return (
        _grouped.product(dz, weight.mT, offsets)[0] if output_mask[0] else None,
        _grouped.weight_gradient(input, dz, offsets, weight, into=into_weight)
        if output_mask[1]
        else None,
        _grouped.row_sums(dz, offsets, into=into_bias) if output_mask[2] else None,
    )
