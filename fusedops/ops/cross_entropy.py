"""Cross-entropy of logits and class indices, without the softmax in memory.

The forward reads the logits once and keeps two numbers per row; the backward reads them once and
writes their gradient once.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops.kernels._arguments import LossArguments, of_backward
from fusedops.ops import _cross_entropy_math as formulas


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the cross-entropy between logits and class indices.

    ``loss = lse - (1 - s) * y_target - s * mean(y) + z_loss * lse^2``

    with ``y = logits``, or ``softcap * tanh(logits / softcap)``, ``lse = log sum_j exp(y_j)`` and
    label smoothing ``s``.

    Args:
        logits: ``[..., num_classes]``, any floating dtype, any strides. They are only read. Up to
            two dimensions this is ``torch.nn.functional.cross_entropy``'s layout; with more, torch
            expects the classes in dimension 1; here they are always last, as in the output of a
            model.
        target: ``[...]``, int64: class indices in ``[0, num_classes)``, or ``ignore_index``.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count.
        label_smoothing: fraction of the target that is distributed over all classes, in [0, 1].
        z_loss: weight of ``lse^2``, which keeps the logits from drifting.
        softcap: bound of the logits' absolute value, or ``None``.
        reduction: ``"mean"`` over the rows that are not ignored (NaN when all are, as torch gives),
            ``"sum"``, or ``"none"``.
        dtype: of the loss: that of ``logits``, or float32 for narrower ones, which gives the loss
            of ``logits.float()`` without that copy. By default that of ``logits``, under autocast
            float32.

    Returns:
        One number, or ``[...]`` for ``"none"``, in ``dtype``.

    Raises:
        ValueError: a shape, device or option does not fit, or (CPU) a target is not a class. On
            CUDA, where a check would wait for the device, the loss and the gradient of such a row
            are NaN.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64), sums of exponentials and of losses are float64
        on the CPU; a loss is rounded once. What is added to all logits of a row changes neither its
        loss (but for the z-loss) nor its gradient by more than the rounding of the logits. A row's
        result does not depend on the other rows, and no result on the number of threads. Saves
        ``logits``, ``target``, two numbers per row and a count; the backward recomputes the softmax
        and writes a new tensor. Twice differentiable. Rows may be sharded, classes may not (the
        vocabulary is replicated). The logits of an ignored row may have any value: its gradient is
        0, where torch's may be NaN. Under autocast the logits keep their dtype.

    Reference:
        Szegedy et al.: Rethinking the Inception Architecture, arXiv:1512.00567 (label smoothing);
        Chowdhery et al.: PaLM, arXiv:2204.02311 (z-loss); Gemma Team: Gemma 2, arXiv:2408.00118
        (soft-capping); Milakov, Gimelshein: Online normalizer calculation for softmax,
        arXiv:1805.02867.

    Example:
        >>> import torch, fusedops
        >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
        >>> fusedops.cross_entropy(logits, torch.tensor([2, -100]))
        tensor(1.3863)
    """
    # The dispatcher would take a bool for an int, bytes for a string and an int for a dtype.
    if type(ignore_index) is not int:
        checks.integer("cross_entropy", "ignore_index", ignore_index)
    if type(reduction) is not str:
        checks.choice("cross_entropy", "reduction", reduction, formulas.REDUCTIONS)
    numbers = ignore_index, label_smoothing, z_loss, formulas.softcap_of("cross_entropy", softcap)
    checks.tensor("cross_entropy", "logits", logits)
    if dtype is not None and type(dtype) is not torch.dtype:
        formulas.check_dtype("cross_entropy", dtype, logits)
    if dtype is None:
        dtype = formulas.result_dtype(logits)
    if reduction == "mean" and type(logits) is not torch.Tensor:
        # Rows of a DTensor may be sharded: then sum and count are parts of those of all ranks.
        statistics = dtypes.statistics_dtype(logits.dtype)
        loss, count, _ = _OP(logits, target, *numbers, "sum", statistics)
        return formulas.reduce_loss(loss, count, dtype, reduction)
    return _OP(logits, target, *numbers, reduction, dtype)[0]


def _check(logits: Any, target: Any, *options: Any) -> None:
    op = "cross_entropy"
    ignore_index, label_smoothing, z_loss, softcap, reduction, dtype = options
    checks.tensor(op, "logits", logits)
    formulas.check_dtype(op, dtype, logits)
    if logits.dim() == 0:
        checks.fail(op, "logits", "a tensor with at least one dimension", "a scalar")
    formulas.check_target(op, target, "logits", logits)
    formulas.check_classes(op, "logits", logits.shape[-1])
    formulas.check_options(op, ignore_index, label_smoothing, z_loss, softcap or None, reduction)


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LossArguments(*args)
    logits, target = call.logits, call.target
    if checks.readable(target):
        formulas.check_range("cross_entropy", target, logits.shape[-1], call.ignore_index)
    y = formulas.capped(logits, call.softcap)
    loss, statistics, count = formulas.row_losses(y, target, call.options)
    loss = loss if call.reduction == "none" else loss.sum()
    return formulas.reduce_loss(loss, count, call.dtype, call.reduction), count, statistics


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LossArguments(*args)
    logits, target = call.logits, call.target
    wide = dtypes.statistics_dtype(logits.dtype)
    return (
        logits.new_empty(target.shape if call.reduction == "none" else (), dtype=call.dtype),
        logits.new_empty((), dtype=wide),
        logits.new_empty((*target.shape, 2), dtype=wide),
    )


def _backward(*args: Any) -> torch.Tensor | None:
    # What was kept is not used: this is also the second derivative.
    (grad_loss,), call, (_, count), output_mask = of_backward(LossArguments, args)
    if not output_mask[0]:
        return None
    if call.reduction == "mean":
        grad_loss = grad_loss.to(count.dtype) / count
    grad = formulas.logits_gradient(grad_loss, call.logits, call.target, call.options)
    return grad.to(call.logits.dtype).contiguous()


def _shard(*args: Any) -> list[Sharding]:
    """Rows are independent, their sum and their count are partial sums; classes are unsharded.

    The mean over sharded rows is not the op's: the public function divides the sums of all ranks.
    """
    call = LossArguments(*args)
    rules: list[Sharding] = [([REPLICATE] * 3, [REPLICATE] * 2)]
    if call.reduction == "mean":
        return rules
    for dim in range(call.logits.ndim - 1):
        loss = dim if call.reduction == "none" else PARTIAL
        rules.append(([loss, PARTIAL, dim], [dim, dim]))
    return rules


def _shard_backward(*args: Any) -> list[Sharding]:
    _, call, _, _ = of_backward(LossArguments, args)
    rules: list[Sharding] = [([REPLICATE], [REPLICATE] * 5)]
    for dim in range(call.logits.ndim - 1):
        grad = dim if call.reduction == "none" else REPLICATE
        rules.append(([dim], [grad, dim, dim, dim, REPLICATE]))
    return rules


_OP = define_op(
    "cross_entropy",
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss,"
    " float softcap, str reduction, ScalarType dtype)"
    " -> (Tensor loss, Tensor count, Tensor statistics)",
    contract={
        "logits": "T [*rows, classes]",
        "classes": "classes >= 1",
        "target": "int64 [*rows]",
        "loss": "dtype [*rows] | []",
        "count": "stat(T) []",
        "statistics": "stat(T) [*rows, 2]",
        "label_smoothing": "0 <= label_smoothing <= 1",
        "z_loss": "0 <= z_loss < inf",
        "softcap": "0 <= softcap < inf",
        "reduction": formulas.REDUCTIONS,
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("logits",),
        outputs=("loss",),
        saves=("logits", "target", "statistics", "count"),
        reference=_backward,
    ),
    triton="fusedops.kernels.cross_entropy",
    shard=_shard,
    shard_backward=_shard_backward,
    check=_check,
)
