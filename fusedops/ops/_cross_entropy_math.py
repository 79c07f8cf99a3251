"""What cross_entropy and linear_cross_entropy share: checks, the formula, its gradient.

With y the logits, soft-capped if asked, V classes, t the target, s the label smoothing:

    lse  = log sum_j exp(y_j)
    loss = lse - (1 - s) * y_t - s * mean(y) + z_loss * lse^2
    dy_j = softmax(y)_j * (1 + 2 * z_loss * lse) - (1 - s) * [j == t] - s / V

A row whose target is ``ignore_index`` has loss 0, gradient 0 and is not counted.

Where the classes are a part of V, the target is -1 if it is in another part: y_t is then 0, mean(y)
the sum over the part divided by V, and lse that of the part; the gradient takes lse of them all.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops.kernels._loss_arguments import LossOptions

REDUCTIONS = ("none", "mean", "sum")


def check_options(
    op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, reduction: Any
) -> None:
    """Raise unless the options of a loss are what they should be."""
    checks.integer(op, "ignore_index", ignore_index)
    checks.probability(op, "label_smoothing", label_smoothing)
    checks.finite(op, "z_loss", z_loss)
    if z_loss < 0:
        checks.fail(op, "z_loss", "not negative", z_loss)
    softcap_of(op, softcap)
    checks.choice(op, "reduction", reduction, REDUCTIONS)


def softcap_of(op: str, softcap: Any) -> float:
    """Return what the ops take as ``softcap``, 0 for ``None``; raise unless it is a bound."""
    if softcap is None:
        return 0.0
    checks.positive(op, "softcap", softcap)
    return float(softcap)


def check_target(op: str, target: Any, owner: str, rows: torch.Tensor) -> None:
    """Raise unless ``target`` holds one class index per row of ``rows`` ``[..., features]``."""
    checks.index_tensor(op, "target", target, dtypes=(torch.int64,))
    if target.device != rows.device:
        checks.fail(op, "target", f"on {rows.device}, the device of {owner}", target.device)
    checks.shape(op, "target", target, rows.shape[:-1], f"{owner} without its last dimension")


def check_dtype(op: str, dtype: Any, logits: torch.Tensor) -> None:
    """Raise unless ``dtype`` is one in which the loss of ``logits`` can be had."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype or None, got {checks.shown(dtype)}")
    allowed = list(dict.fromkeys((logits.dtype, dtypes.statistics_dtype(logits.dtype))))
    if dtype not in allowed:
        expected = " or ".join(str(choice).removeprefix("torch.") for choice in allowed)
        checks.fail(op, "dtype", f"{expected} for these logits", str(dtype).removeprefix("torch."))


def check_classes(op: str, owner: str, num_classes: int) -> None:
    """Raise unless there is a class."""
    if num_classes == 0:
        checks.fail(op, owner, "of at least one class", "none")


def check_range(
    op: str, target: torch.Tensor, num_classes: int, ignore_index: int, *, least: int = 0
) -> None:
    """Raise for a target outside the classes. Reads values: for CPU tensors only."""
    wrong = ((target < least) | (target >= num_classes)) & (target != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.flatten().nonzero()[0])
        got = f"{int(target.flatten()[row])} at row {row}"
        checks.fail(op, "target", f"in [0, {num_classes}) or ignore_index {ignore_index}", got)


def reduce_loss(
    loss: torch.Tensor, count: torch.Tensor, dtype: torch.dtype, reduction: str
) -> torch.Tensor:
    """Finish a sum (or rows): divide it for the mean, and round to the result's dtype.

    Outside the op for sharded rows, of which sum and count are partial sums over ranks: DTensor
    then reduces two numbers, and no logits.
    """
    if reduction == "mean":
        loss = loss / count
    return loss if loss.dtype == dtype else loss.to(dtype)


def result_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of the loss: that of the logits; under autocast float32, as torch's."""
    half = logits.dtype in (torch.bfloat16, torch.float16)
    if half and dtypes.autocast_dtype(logits.device) is not None:
        return torch.float32
    return logits.dtype


def capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return the logits in accumulation dtype, soft-capped."""
    wide = logits.to(dtypes.statistics_dtype(logits.dtype))
    return wide if softcap == 0.0 else softcap * torch.tanh(wide / softcap)


def row_losses(
    y: torch.Tensor, target: torch.Tensor, options: LossOptions, all_classes: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss and log-sum-exp per row (0 where ignored) and the count of rows not ignored.

    A target outside the classes gives NaN. The count has the dtype of the losses.
    """
    valid = target != options.ignore_index
    lse = torch.where(valid, torch.logsumexp(y, -1), 0.0)
    count = valid.sum(dtype=lse.dtype)
    if all_classes > 0:
        loss = _part_loss(y, lse, target, options, all_classes)
        return torch.where(valid, loss, 0.0), lse, count
    inside = (target >= 0) & (target < y.shape[-1])
    logs = torch.log_softmax(y, -1)  # NaN where an infinity makes the log-sum-exp infinite
    label = logs.gather(-1, torch.where(inside, target, 0).unsqueeze(-1)).squeeze(-1)
    label = torch.where(inside, label, math.nan)
    loss = (options.label_smoothing - 1.0) * label + options.z_loss * lse.square()
    if options.label_smoothing > 0.0:
        loss = loss - options.label_smoothing * logs.mean(-1)
    return torch.where(valid, loss, 0.0), lse, count


def _part_loss(
    y: torch.Tensor, lse: torch.Tensor, target: torch.Tensor, options: LossOptions, all_classes: int
) -> torch.Tensor:
    """Return the loss of rows whose classes are a part of all."""
    here = (target >= 0) & (target < y.shape[-1])
    label = y.gather(-1, torch.where(here, target, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1.0 - options.label_smoothing) * torch.where(here, label, 0.0)
    if options.label_smoothing > 0.0:
        loss = loss - options.label_smoothing * y.sum(-1) / all_classes
    return loss + options.z_loss * lse.square() if options.z_loss > 0.0 else loss


def logits_gradient(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    all_classes: int = 0,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits in accumulation dtype; differentiable.

    ``grad_loss`` is one number, or one per row. Everything is computed from ``logits``: it is the
    second derivative too. Only for a part of the classes the log-sum-exp of all must be given.
    """
    y = capped(logits, options.softcap)
    valid = target != options.ignore_index
    here = inside = (target >= 0) & (target < y.shape[-1])
    if all_classes > 0:
        inside = inside | (target == -1)
    index = torch.where(here, target, 0).unsqueeze(-1)
    lse = torch.logsumexp(y, -1, keepdim=True) if lse is None else lse.unsqueeze(-1)
    share = (1.0 - options.label_smoothing) * here.to(y.dtype).unsqueeze(-1)
    hit = torch.zeros_like(y).scatter(-1, index, share)
    grad = torch.exp(y - lse) * (1.0 + 2.0 * options.z_loss * lse) - hit
    if options.label_smoothing > 0.0:
        grad = grad - options.label_smoothing / (all_classes or y.shape[-1])
    if options.softcap != 0.0:
        grad = grad * (1.0 - (y / options.softcap).square())
    grad = grad * grad_loss.to(y.dtype).expand(target.shape).unsqueeze(-1)
    grad = torch.where(inside.unsqueeze(-1), grad, math.nan)
    return torch.where(valid.unsqueeze(-1), grad, 0.0)
