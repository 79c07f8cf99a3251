"""Layer normalisation: each row to mean 0 and deviation 1, then scale and shift.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

over the last dimensions, as ``torch.nn.functional.layer_norm``. Statistics are float32 (float64 for
float64 input) and two-pass. Kernels: ``csrc/cpu/norm/norm.*``, ``csrc/cuda/norm.*``,
``kernels/layer_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math
from fusedops.ops._norm_math import affine, norm_gradients, normalize, row_placements, rows


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise over the last ``len(normalized_shape)`` dimensions.

    ``y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias``

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of ``input`` (float32 is also accepted if that is a
            half-precision dtype).
        bias: as ``weight``.
        eps: added to the variance.

    Returns:
        Shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Statistics and all arithmetic are float32 (float64 for float64); the result is rounded
        once. A row's result does not depend on the other rows; parameter gradients are summed in
        a fixed order: the same bits for any number of threads. Saves ``input``, ``weight`` and two
        numbers per row. Backends: cpp, cuda, triton, torch. Under autocast: as torch, float32 on
        CUDA, unchanged on the CPU.

    Reference:
        Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450.

    Example:
        >>> import torch, fusedops
        >>> fusedops.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,), eps=0.0)
        tensor([[-1.2247,  0.0000,  1.2247]])
    """
    normalized_shape = plain_sizes(normalized_shape)
    return _OP(input, normalized_shape, weight, bias, eps)[0]


def _check(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    checks.tensor("layer_norm", "input", input)
    _norm_math.check("layer_norm", "input", input, normalized_shape, weight, bias, eps)


def _reference(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normalized = normalize(input, normalized_shape, eps)
    output = affine(normalized.values, weight, bias).to(input.dtype).contiguous()
    leading = rows(input, normalized_shape)
    return output, normalized.mean.reshape(leading), normalized.rstd.reshape(leading)


def _backward_reference(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, input, weight, *_, normalized_shape, eps, output_mask = args
    normalized = normalize(input, normalized_shape, eps)
    parameter = input.dtype if weight is None else weight.dtype
    grad_input, *grad_parameters = norm_gradients(
        grad_output, normalized, weight, normalized_shape, parameter, output_mask
    )
    if grad_input is not None:
        grad_input = grad_input.to(input.dtype).contiguous()
    return grad_input, *grad_parameters


def _backward_fake(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    parameter = input.dtype if weight is None else weight.dtype
    return (
        input.new_empty(input.shape) if output_mask[0] else None,
        input.new_empty(normalized_shape, dtype=parameter) if output_mask[1] else None,
        input.new_empty(normalized_shape, dtype=parameter) if output_mask[2] else None,
    )


def _shard(input: Any, normalized_shape: Sequence[int]) -> list[Sharding]:
    """Rows are independent: any leading dim may be sharded, parameters are replicated."""
    dims = row_placements(input, normalized_shape)
    return [([dim] * 3, [dim, REPLICATE, REPLICATE]) for dim in dims]


_OP = define_op(
    "layer_norm",
    "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor output, Tensor mean, Tensor rstd)",
    contract={
        "input, output": "T [*rows, *normalized_shape]",
        "weight, bias": "param(T) [*normalized_shape]",
        "mean, rstd": "stat(T) [*rows]",
        "normalized_shape": "len(normalized_shape) >= 1",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "weight", "bias"),
        outputs=("output",),
        saves=("input", "weight", "mean", "rstd"),
        reference=_backward_reference,
        fake=_backward_fake,
    ),
    autocast="norm",
    triton="fusedops.kernels.layer_norm",
    shard=_shard,
    check=_check,
)
