"""Dropout, residual sum and root-mean-square normalisation in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core.tracing import plain_sizes
from fusedops.ops import _norm_math, _residual
from fusedops.ops._norm_math import default_eps, in_float32
from fusedops.ops._norm_op import NormOp

_OP = NormOp(centred=False, residual=True, name="add_rms_norm").define()


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the residual stream and divide the sum by its root mean square.

    ``summed = residual + dropout(input); normed = rms_norm(summed) * (weight + weight_offset)``

    Args:
        input: ``[..., *normalized_shape]``, any floating dtype, any strides.
        residual: the shape of ``input``, any floating dtype.
        normalized_shape: sizes of the trailing dimensions.
        weight: ``normalized_shape``, dtype of the sum (float32 is also accepted if that is a
            half-precision dtype).
        eps: added to the mean square; ``None``: as ``rms_norm``.
        weight_offset: added to the weight, in float32; 1 for Gemma.
        rounding: ``"torch"`` or ``"hf"``, see ``rms_norm``.
        dropout_p: probability with which an element of ``input`` is dropped; the others are scaled
            by ``1 / (1 - dropout_p)``. Dropped elements are 0 even if they were NaN or infinite.
        training: ``False`` turns dropout off.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. A shard of a larger tensor needs more numbers (``_core/philox.py``).

    Returns:
        ``(normed, summed)``, the shape of ``input``, contiguous. ``summed`` has the dtype that
        ``residual + input`` has in torch, ``normed`` that of ``rms_norm(summed)``. Both are
        differentiable.

    Raises:
        ValueError: a shape or device does not fit, ``rounding`` is unknown, or ``dropout_p`` is
            outside [0, 1].
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); ``normed`` is computed from the rounded sum. On
        the CPU without dropout it has the bits of ``residual + input`` followed by torch's
        ``rms_norm`` or ``LlamaRMSNorm``, with the exceptions of ``rms_norm``. A row's result does
        not depend on the other rows; the weight's gradient is summed in a fixed order: the same
        bits for any number of threads. The dropout mask is drawn by a counter from a seed of
        torch's generator and never stored: the same in forward, backward, recomputation and on
        every backend. Saves ``summed``, ``weight``, one number per row and the seed; never
        ``input``. Under autocast: as ``rms_norm``.

    Reference:
        Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> import torch, fusedops
        >>> x, residual = torch.ones(1, 2), torch.tensor([[2.0, 3.0]])
        >>> fusedops.add_rms_norm(x, residual, (2,), eps=0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    normalized_shape = plain_sizes(normalized_shape)
    if _residual.is_plain(input, residual, normalized_shape, dropout_p, training, seed):
        _norm_math.check_rms("add_rms_norm", weight_offset, rounding)
        eps = default_eps(residual, eps)
        plain = (weight, None, eps, weight_offset, rounding, 0.0, input.dtype)
        return _OP(input, residual, normalized_shape, *plain)[:2]
    dtype = _residual.check("add_rms_norm", input, residual, "dropout_p", dropout_p, training)
    source, stream = _residual.promote(input, residual, dtype)
    checked_eps = 0.0 if eps is None else eps
    checked = (stream, normalized_shape, weight, None, checked_eps)
    _norm_math.check("add_rms_norm", "the sum", *checked)
    _norm_math.check_rms("add_rms_norm", weight_offset, rounding)
    if stream.is_cuda and rounding == "torch" and torch.is_autocast_enabled("cuda"):
        # Autocast's work for all but `input`, which the kernels read in half precision.
        stream, weight = in_float32(stream), in_float32(weight)
    seed, p = _residual.draw_seed("add_rms_norm", source, dropout_p, training, seed)
    eps = default_eps(stream, eps)
    arguments = (source, stream, normalized_shape, weight, seed, eps, weight_offset, rounding, p)
    return _OP(*arguments, source.dtype)[:2]
