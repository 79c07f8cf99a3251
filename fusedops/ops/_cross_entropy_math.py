"""What the losses and token_logprobs share: checks, the formulas, their gradients.

With y the logits, soft-capped if asked, V classes, t the target, s the label smoothing:

    m    = max_j y_j,   S = sum_j exp(y_j - m),   lse = m + log S
    loss = log S - (1 - s) * (y_t - m) - s * mean(y - m) + z_loss * lse^2
    dy_j = exp(y_j - m) / S * (1 + 2 * z_loss * lse) - (1 - s) * [j == t] - s / V

A row whose target is ``ignore_index`` has loss 0, gradient 0 and is not counted. The statistics of
a row are m and S: the rounding of lse in one number would be a relative error of the softmax that
grows with lse.

token_logprobs, with y also divided by the temperature, and p_j = exp(y_j - m) / S:

    mean = sum_j p_j (y_j - m),   logprob = y_t - lse,   entropy = log S - mean
    dy_j = p_j * (d_lse - d_logprob - d_entropy * (y_j - m - mean)) + d_logprob * [j == t]

Where the classes are a part of V, the target is -1 if it is in another part: y_t - m is then 0,
mean(y - m) the sum over the part divided by V, and m and S those of the part; the gradient takes
those of them all.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops.kernels._arguments import LossOptions

REDUCTIONS = ("none", "mean", "sum")


def check_options(
    op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, reduction: Any
) -> None:
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
    checks.index_tensor(op, "target", target, dtypes=(torch.int64,))
    if target.device != rows.device:
        checks.fail(op, "target", f"on {rows.device}, the device of {owner}", target.device)
    checks.shape(op, "target", target, rows.shape[:-1], f"{owner} without its last dimension")


def check_dtype(op: str, dtype: Any, logits: torch.Tensor) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype or None, got {checks.shown(dtype)}")
    allowed = list(dict.fromkeys((logits.dtype, dtypes.statistics_dtype(logits.dtype))))
    if dtype not in allowed:
        expected = " or ".join(str(choice).removeprefix("torch.") for choice in allowed)
        checks.fail(op, "dtype", f"{expected} for these logits", str(dtype).removeprefix("torch."))


def check_classes(op: str, owner: str, num_classes: int) -> None:
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
    wide = logits.to(dtypes.statistics_dtype(logits.dtype))
    return wide if softcap == 0.0 else softcap * torch.tanh(wide / softcap)


def row_losses(
    y: torch.Tensor, target: torch.Tensor, options: LossOptions, all_classes: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss and statistics per row (0 where ignored) and the count of rows not ignored.

    A target outside the classes gives NaN. The count has the dtype of the losses.
    """
    valid = target != options.ignore_index
    largest = y.amax(-1)
    shifted = y - largest.unsqueeze(-1)  # NaN where the largest is infinite
    total = shifted.exp().sum(-1)
    log_total = total.log()
    here = (target >= 0) & (target < y.shape[-1])
    label = shifted.gather(-1, torch.where(here, target, 0).unsqueeze(-1)).squeeze(-1)
    label = torch.where(here, label, 0.0 if all_classes > 0 else math.nan)
    loss = log_total - (1.0 - options.label_smoothing) * label
    if options.label_smoothing > 0.0:
        loss = loss - options.label_smoothing * shifted.sum(-1) / (all_classes or y.shape[-1])
    if options.z_loss > 0.0:
        loss = loss + options.z_loss * (largest + log_total).square()
    statistics = torch.stack((largest, total), -1)
    return (
        torch.where(valid, loss, 0.0),
        torch.where(valid.unsqueeze(-1), statistics, 0.0),
        valid.sum(dtype=loss.dtype),
    )


def logits_gradient(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    all_classes: int = 0,
    statistics: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits in accumulation dtype; differentiable.

    ``grad_loss`` is one number, or one per row. Everything is computed from ``logits``: it is the
    second derivative too. Only for a part of the classes the statistics of all must be given.
    """
    y = capped(logits, options.softcap)
    valid = target != options.ignore_index
    here = inside = (target >= 0) & (target < y.shape[-1])
    if all_classes > 0:
        inside = inside | (target == -1)
    index = torch.where(here, target, 0).unsqueeze(-1)
    if statistics is None:
        softmax, lse = torch.softmax(y, -1), torch.logsumexp(y, -1, keepdim=True)
    else:
        largest, total = statistics.unsqueeze(-2).unbind(-1)
        softmax, lse = torch.exp(y - largest) / total, largest + total.log()
    share = (1.0 - options.label_smoothing) * here.to(y.dtype).unsqueeze(-1)
    hit = torch.zeros_like(y).scatter(-1, index, share)
    grad = softmax * (1.0 + 2.0 * options.z_loss * lse) - hit
    if options.label_smoothing > 0.0:
        grad = grad - options.label_smoothing / (all_classes or y.shape[-1])
    if options.softcap != 0.0:
        grad = grad * (1.0 - (y / options.softcap).square())
    grad = grad * grad_loss.to(y.dtype).expand(target.shape).unsqueeze(-1)
    grad = torch.where(inside.unsqueeze(-1), grad, math.nan)
    return torch.where(valid.unsqueeze(-1), grad, 0.0)


def check_token_options(op: str, temperature: Any, softcap: Any, ignore_index: Any) -> float:
    """Check the numbers of ``token_logprobs``; return the soft-cap as the ops take it."""
    checks.integer(op, "ignore_index", ignore_index)
    checks.positive(op, "temperature", temperature)
    return softcap_of(op, softcap)


def _log_shares(y: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, but 0 for a class of probability 0, which adds nothing."""
    shares = torch.log_softmax(y, -1)
    return torch.where(shares == -math.inf, 0.0, shares)


def token_rows(
    y: torch.Tensor, target: torch.Tensor, ignore_index: int, *, partial: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability, entropy and lse ``[3, *rows]``, and statistics ``[*rows, 4]``.

    The statistics are m, S, the mean, and 1 where the target has the largest logit. With
    ``partial`` -1 is a target that is none of the classes: its logit counts as m.
    """
    valid = target != ignore_index
    largest = y.amax(-1)
    shifted = y - largest.unsqueeze(-1)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    terms = exponentials * torch.where(shifted == -math.inf, 0.0, shifted)
    mean, log_total = terms.sum(-1) / total, total.log()
    here = (target >= 0) & (target < y.shape[-1])
    label = shifted.gather(-1, torch.where(here, target, 0).unsqueeze(-1)).squeeze(-1)
    label = torch.where(here, label, 0.0 if partial else math.nan)
    hit = (here & (label >= 0)).to(y.dtype)
    tokens = torch.stack((label - log_total, log_total - mean, largest + log_total))
    statistics = torch.stack((largest, total, mean, hit), -1)
    return torch.where(valid, tokens, 0.0), torch.where(valid.unsqueeze(-1), statistics, 0.0)


def token_gradient(
    grad_tokens: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    statistics: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the logits in accumulation dtype; differentiable.

    Only for a part of the classes the statistics of all must be given; a target of -1 is then
    another part's.
    """
    y = capped(logits, options.softcap) * options.inverse_temperature
    grads = torch.where(target == options.ignore_index, 0.0, grad_tokens.to(y.dtype))
    of_logprob, of_entropy, of_lse = grads.unsqueeze(-1)
    here = inside = (target >= 0) & (target < y.shape[-1])
    if statistics is None:
        shares, logs = torch.softmax(y, -1), _log_shares(y)
        entropy = -(shares * logs).sum(-1, keepdim=True)
    else:
        inside = inside | (target == -1)
        largest, total, mean, _ = statistics.unsqueeze(-2).unbind(-1)
        logs = y - largest - total.log()
        shares, entropy = logs.exp(), total.log() - mean
        logs = torch.where(logs == -math.inf, 0.0, logs)
    grad = shares * (of_lse - of_logprob - of_entropy * (logs + entropy))
    index = torch.where(here, target, 0).unsqueeze(-1)
    grad = grad.scatter_add(-1, index, of_logprob * here.to(y.dtype).unsqueeze(-1))
    grad = grad * options.inverse_temperature
    if options.softcap != 0.0:
        grad = grad * (1.0 - torch.tanh(logits.to(y.dtype) / options.softcap).square())
    grad = torch.where(inside.unsqueeze(-1), grad, math.nan)
    return torch.where((target != options.ignore_index).unsqueeze(-1), grad, 0.0)
