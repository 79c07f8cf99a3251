"""Accumulation dtypes, torch's numbers of dtypes, autocast rules, and the tests' error budget.

No tolerance is written anywhere else in the project.
"""

from __future__ import annotations

import torch

# What autocast does to an op's floating arguments. Float64 is never touched.
AUTOCAST_RULES = {
    "keep": "nothing: arguments keep their dtypes, as torch does for element-wise functions",
    "lower": "factors and addends are cast to the autocast dtype, as torch does for linear",
    "promote": "all arguments are cast to the widest dtype among them",
    "norm": "float32 on CUDA, as torch does for layer_norm; nothing on the CPU, nor with "
    "rounding='hf'",
}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, means and other statistics over values of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on ``device``, ``None`` where it is off.

    A meta tensor, whose device autocast does not know (torch raises), keeps its dtype.
    """
    kind = device.type  # reading it takes 0.3 us
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of a dense tensor as another dtype, whatever its strides are.

    ``tensor.contiguous().view(dtype)`` raises where a dimension of one element has another stride
    than that of a new tensor.
    """
    dense = tensor.contiguous()
    strides = torch._prims_common.make_contiguous_strides_for(dense.shape)
    return dense.as_strided(dense.shape, strides).view(dtype)


def error_budget(
    eager: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, *, depth: int = 1
) -> torch.Tensor:
    """Return the absolute error that each element of a result may have.

    At most twice the largest error that eager torch makes in the same dtype, plus a rounding
    band: the spacing of ``dtype`` at the value, and the spacing of the accumulation dtype at the
    tensor's scale times the square root of ``depth``.

    Args:
        eager: result of eager torch in ``dtype``.
        truth: result in float64.
        dtype: dtype of the result under test.
        depth: number of terms that are summed into one element.

    Returns:
        A float64 tensor of the shape of ``truth``.
    """
    if truth.numel() == 0:
        return torch.zeros_like(truth)
    eager_error = (eager.double() - truth).abs().nan_to_num(0.0, 0.0, 0.0).max()
    spacing = torch.finfo(dtype).eps * truth.abs()
    scale = truth.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1.0)
    # Float64 has no better truth: it is compared with another rounding of the same formula, whose
    # inner values may be larger than the result (gradcheck holds the formula itself to account).
    factor = 1024.0 if dtype == torch.float64 else 4.0
    accumulated = factor * torch.finfo(statistics_dtype(dtype)).eps * scale * depth**0.5
    return 2.0 * eager_error + spacing + accumulated


def parity_budget(
    single: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, scale: float
) -> float:
    """Return the absolute error that values of a parallel run may have.

    Sums are cut differently there, so its error may be a few times that of a single process, or
    of the rounding of the largest number that goes into the same backward: a gradient that is zero
    in exact arithmetic (a key's bias) is a difference of such numbers.

    Args:
        single: what one process computes in ``dtype``.
        truth: the same in float64.
        dtype: dtype of the computation.
        scale: largest value of the truth's kind (of all gradients, of all weights).
    """
    if truth.numel() == 0:
        return 0.0
    alone = float((single.double() - truth.double()).abs().nan_to_num(0.0, 0.0, 0.0).max())
    # In half precision sums are made in float32 and rounded once: over four times its own error a
    # single process' rounding was exceeded by 0.03 of one, in 12 drawn cases of four models.
    factor = {torch.float64: 4096.0, torch.float32: 64.0}.get(dtype, 2.0)
    return 4.0 * alone + factor * torch.finfo(dtype).eps * max(scale, torch.finfo(dtype).tiny)


def exchange_budget(truth: torch.Tensor) -> float:
    """Return the absolute error in float64 of what is computed in parts: 1e-12 of its scale.

    Args:
        truth: what one process computes.
    """
    if truth.numel() == 0:
        return 0.0
    return 1e-12 * max(1.0, float(truth.abs().max()))


def rms_budget(
    eager: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, *, depth: int = 1
) -> float:
    """Return the root mean square error that a whole result may have.

    The rule of ``error_budget`` for the mean instead of each element: what half precision does to
    single gradients of a whole model is luck, and the largest of few elements is luck too.
    """
    if truth.numel() == 0:
        return 0.0
    eager_error = rms(eager.double() - truth)
    spacing = torch.finfo(dtype).eps * rms(truth)
    accumulated = 4.0 * torch.finfo(statistics_dtype(dtype)).eps * max(rms(truth), 1.0) * depth**0.5
    return 2.0 * eager_error + spacing + accumulated


def training_difference(steps: int) -> float:
    """Return how far apart the losses of a step may be, relatively, of two runs in float32.

    They add up the same numbers in other orders. AdamW divides by the size of the gradient, so that
    its roundings become some of the weights', and each step adds its own.
    """
    return 64 * torch.finfo(torch.float32).eps * steps


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def ulps(actual: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the error of ``actual`` against float64 ``truth`` in units of its last place.

    The unit is the spacing of ``actual.dtype`` at the true value, at least the spacing at the
    tensor's root mean square times 2**-8: near a zero of the function an error relative to the
    value alone would say nothing.
    """
    if truth.numel() == 0:
        return torch.zeros_like(truth)
    eps = torch.finfo(actual.dtype).eps
    floor = truth.square().mean().sqrt() * 2.0**-8
    magnitude = torch.maximum(truth.abs(), floor).clamp_min(torch.finfo(actual.dtype).tiny)
    unit = eps * 2.0 ** torch.floor(torch.log2(magnitude))
    return (actual.double() - truth).abs() / unit
