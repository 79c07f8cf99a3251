"""Dropout, residual sum and layer normalisation in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math, _residual
from fusedops.ops._norm_math import in_float32
from fusedops.ops._norm_op import NormOp

_OP = NormOp(centred=True, residual=True, name="add_layer_norm").define()


def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream and normalise the sum.

    ``summed = residual + dropout(input); normed = layer_norm(summed) * weight + bias``

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        residual: the shape of ``input``, any floating dtype.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of the sum (float32 is also accepted if that is a
            half-precision dtype).
        bias: as ``weight``.
        eps: added to the variance.
        dropout_p: probability with which an element of ``input`` is dropped; the others are scaled
            by ``1 / (1 - dropout_p)``. Dropped elements are 0 even if they were NaN or infinite.
        training: ``False`` turns dropout off.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. A shard of a larger tensor needs more numbers (``_core/philox.py``).

    Returns:
        ``(normed, summed)``, the shape of ``input``, contiguous, both of the dtype that
        ``residual + input`` has in torch. Both are differentiable.

    Raises:
        ValueError: a shape or device does not fit, or ``dropout_p`` is outside [0, 1].
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); each output is rounded once, and ``normed`` is
        computed from the rounded sum. A row's result does not depend on the other rows; parameter
        gradients are summed in a fixed order: the same bits for any number of threads. The dropout
        mask is drawn by a counter from a seed of torch's generator and never stored: the same in
        forward, backward, recomputation and on every backend. Saves ``summed``, ``weight``, two
        numbers per row and the seed; never ``input``. Under autocast: as torch's layer_norm,
        float32 on CUDA, unchanged on the CPU.

    Reference:
        Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450.

    Example:
        >>> import torch, fusedops
        >>> x, residual = torch.ones(1, 3), torch.tensor([[0.0, 1.0, 2.0]])
        >>> fusedops.add_layer_norm(x, residual, (3,), eps=0.0)
        (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[1., 2., 3.]]))
    """
    normalized_shape = plain_sizes(normalized_shape)
    if _residual.is_plain(input, residual, normalized_shape, dropout_p, training, seed):
        plain = (normalized_shape, weight, bias, None, eps, 0.0, input.dtype)
        return _OP(input, residual, *plain)[:2]
    dtype = _residual.check("add_layer_norm", input, residual, "dropout_p", dropout_p, training)
    source, stream = _residual.promote(input, residual, dtype)
    _norm_math.check("add_layer_norm", "the sum", stream, normalized_shape, weight, bias, eps)
    if stream.is_cuda and torch.is_autocast_enabled("cuda"):
        # Autocast's work for all but `input`, which the kernels read in half precision.
        stream, weight, bias = in_float32(stream), in_float32(weight), in_float32(bias)
    seed, p = _residual.draw_seed("add_layer_norm", source, dropout_p, training, seed)
    arguments = (source, stream, normalized_shape, weight, bias, seed, eps, p, source.dtype)
    return _OP(*arguments)[:2]
