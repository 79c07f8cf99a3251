"""Layer normalisation: each row to mean 0 and deviation 1, then scale and shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.tracing import plain_sizes
from fusedops.ops._norm_op import NormOp

# Schema, checks, reference and gradient are shared by the four norms: ``_norm_op.py``.
_OP = NormOp(centred=True, residual=False, name="layer_norm").define()


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
        Statistics and all arithmetic are float32 (float64 for float64); the result is rounded once.
        A row's result does not depend on the other rows; parameter gradients are summed in a fixed
        order: the same bits for any number of threads. Saves ``input``, ``weight`` and two numbers
        per row. Under autocast: as torch, float32 on CUDA, unchanged on the CPU.

    Reference:
        Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450.

    Example:
        >>> import torch, fusedops
        >>> fusedops.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,), eps=0.0)
        tensor([[-1.2247,  0.0000,  1.2247]])
    """
    normalized_shape = plain_sizes(normalized_shape)
    return _OP(input, normalized_shape, weight, bias, eps)[0]  # without the saved statistics
