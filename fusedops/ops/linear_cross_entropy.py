"""A language model's head and its cross-entropy, without large logits in memory.

The logits are computed for ``chunk_size`` classes at a time, for all rows. The chunks are of
classes and not of rows, because the gradient of a class's weight is then complete within its chunk,
summed in float32 inside one matrix product and rounded once; what accumulates over chunks is the
gradient of ``hidden``, in a float32 buffer of its size. Chunks of rows would accumulate
``[num_classes, hidden_size]`` in float32, read and written once a chunk, or (as others did, and
diverged) in low precision.

The registered op also accepts a shard of the classes, where ``all_classes`` is the number of all
classes: see ``_cross_entropy_math.py`` and ``parallel/tensor/vocabulary.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks, dtypes
from fusedops._core.layouts import as_matrix
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Sharding
from fusedops._core.tracing import holds_for_all
from fusedops.kernels._arguments import (
    LinearLossArguments,
    LinearTokenArguments,
    of_backward,
)
from fusedops.ops import _cross_entropy_math as formulas
from fusedops.ops.linear_act import check_layer, records_graph

# Classes at a time: 32 MiB of float32 logits for 2048 rows. The same for every number of rows, so
# that a row's gradient does not depend on the batch.
DEFAULT_CHUNK = 4096
# Bytes of logits. Made again they cost a product in four: on two cores of a server nearly a second
# for 2048 rows of GPT-2's words.
_KEPT_ON_CPU = 512 << 20


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
    recompute: bool | None = None,
) -> torch.Tensor:
    """Compute the cross-entropy of a linear layer's outputs without keeping the outputs.

    ``cross_entropy(hidden W^T + b, target)``

    Args:
        hidden: ``[..., hidden_size]``, any floating dtype, any strides.
        weight: ``[num_classes, hidden_size]``, dtype of ``hidden``; may be an embedding's.
        target: ``[...]``, int64: class indices in ``[0, num_classes)``, or ``ignore_index``.
        bias: ``[num_classes]``, dtype of ``hidden``.
        ignore_index: rows with this target have loss 0 and gradient 0 and do not count. On the CPU
            nothing is computed for them.
        label_smoothing: fraction of the target that is distributed over all classes, in [0, 1].
        z_loss: weight of ``lse^2``, ``lse`` being the log-sum-exp of a row's logits.
        softcap: bound of the logits' absolute value, or ``None``.
        reduction: ``"mean"`` over the rows that are not ignored (NaN when all are, as torch gives),
            ``"sum"``, or ``"none"``.
        chunk_size: number of classes whose logits are in memory at a time; ``None``: 4096.
        recompute: ``True``: the backward recomputes the logits; ``False``: all of them are saved in
            float32; ``None``: they are saved if they take no more memory than ``weight``, on the
            CPU if they take up to 512 MiB.

    Returns:
        One number, or ``[...]`` for ``"none"``; dtype of ``hidden``, under autocast float32.

    Raises:
        ValueError: a shape, device or option does not fit, or (CPU) a target is not a class. On
            CUDA the loss of such a row, and every gradient that depends on it, are NaN.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Products accumulate in float32 (float64 for float64) and the logits stay in that dtype; the
        gradient of the logits, as an operand of two products, and each result are rounded once to
        the dtype of ``hidden``. A row's loss and gradient do not depend on the other rows on the
        CPU, nor any result on the number of threads; with either ``recompute`` the results are the
        same bits there. If the logits are not saved, memory in addition to the arguments and their
        gradients is ``rows * chunk_size`` float32 logits, and in the backward of half precision a
        float32 copy of ``hidden``. The op then computes four products, where a loss on complete
        logits computes three. Measured forward and backward at 2048 x 768 and 50257 classes with
        ``recompute=True``, beyond the arguments: 197 MiB in float32 (153 are the gradients) where
        ``F.linear`` and ``F.cross_entropy`` take 1188, 105 and 589 in bfloat16. The op is twice
        differentiable, by complete logits. Rows may be sharded, classes may not. Ignored rows of
        ``hidden`` may have any value (on Triton, where all rows are multiplied, NaN among them
        reaches the gradient of ``weight``). Under autocast all arguments are cast, as torch does
        for linear.

    Reference:
        Wijmans et al.: Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009; Hsu
        et al.: Liger Kernel, arXiv:2410.10989.

    Example:
        >>> import torch, fusedops
        >>> hidden, weight = torch.ones(2, 3), torch.zeros(4, 3)
        >>> fusedops.linear_cross_entropy(hidden, weight, torch.tensor([2, -100]))
        tensor(1.3863)
    """
    op = "linear_cross_entropy"
    check(op, hidden, weight, target, bias)
    check_chunks(op, chunk_size, recompute)
    formulas.check_options(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
    numbers = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
    reduced = "sum" if reduction == "mean" else reduction
    keep = keeps_logits(recompute, hidden, weight, bias)
    form = (reduced, chunk_size or DEFAULT_CHUNK, keep, 0)
    loss, count, *_ = _OP(hidden, weight, target, bias, *numbers, *form)
    return formulas.reduce_loss(loss, count, formulas.result_dtype(hidden), reduction)


def check(
    op: str, hidden: Any, weight: Any, target: Any, bias: Any, *, owner: str = "hidden"
) -> None:
    """Raise unless the tensors fit together; ``owner`` is what messages call ``hidden``."""
    checks.tensor(op, owner, hidden)
    if hidden.dim() == 0:
        checks.fail(op, owner, "a tensor with at least one dimension", "a scalar")
    features = hidden.shape[-1]
    shape = f"[num_classes, {features}] ({owner} has {features} features)"
    check_layer(op, hidden, weight, bias, ("weight", "bias"), features, shape)
    formulas.check_target(op, target, owner, hidden)
    formulas.check_classes(op, "weight", weight.shape[0])


def check_chunks(op: str, chunk_size: Any, recompute: Any) -> None:
    """Raise unless the options of how the loss is computed are what they should be."""
    if chunk_size is not None:
        checks.integer(op, "chunk_size", chunk_size, least=1)
    if recompute is not None:
        checks.flag(op, "recompute", recompute)


def keeps_logits(
    recompute: bool | None, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Return whether the forward keeps the logits for the backward."""
    if not records_graph(hidden, weight, bias):
        return False
    if recompute is not None:
        return not recompute
    classes, features = weight.shape
    bytes_per_class = dtypes.statistics_dtype(hidden.dtype).itemsize * math.prod(hidden.shape[:-1])
    if hidden.is_cpu and holds_for_all(bytes_per_class * classes <= _KEPT_ON_CPU):
        return True
    return holds_for_all(bytes_per_class <= features * weight.dtype.itemsize)


def logits_of(
    call: LinearLossArguments | LinearTokenArguments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden, weight and the logits in accumulation dtype."""
    wide = dtypes.statistics_dtype(call.hidden.dtype)
    h, w = call.hidden.to(wide), call.weight.to(wide)
    return h, w, F.linear(h, w, None if call.bias is None else call.bias.to(wide))


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LinearLossArguments(*args)
    target, classes = call.target, call.weight.shape[0]
    if checks.readable(target):
        least = -1 if call.all_classes > 0 else 0
        formulas.check_range(
            "linear_cross_entropy", target, classes, call.ignore_index, least=least
        )
    _, _, logits = logits_of(call)
    y = formulas.capped(logits, call.softcap)
    loss, statistics, count = formulas.row_losses(y, target, call.options, call.all_classes)
    kept = logits if call.keep_logits else logits.new_empty((*target.shape, 0))
    return (loss if call.reduction == "none" else loss.sum()), count, statistics, kept


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LinearLossArguments(*args)
    hidden, target = call.hidden, call.target
    wide = dtypes.statistics_dtype(hidden.dtype)
    kept = (*target.shape, call.weight.shape[0] if call.keep_logits else 0)
    return (
        hidden.new_empty(target.shape if call.reduction == "none" else (), dtype=wide),
        hidden.new_empty((), dtype=wide),
        hidden.new_empty((*target.shape, 2), dtype=wide),
        hidden.new_empty(kept, dtype=wide),
    )


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    # What was kept is not used: this is also the second derivative. But a part of the classes does
    # not know the statistics of all, and has no second derivative.
    (grad_loss,), call, (statistics, _), output_mask = of_backward(LinearLossArguments, args)
    rest = (call.options, call.all_classes, statistics if call.all_classes > 0 else None)

    def logits_gradient(logits: torch.Tensor) -> torch.Tensor:
        return formulas.logits_gradient(grad_loss, logits, call.target, *rest)

    return factor_gradients(call, logits_gradient, output_mask)


def factor_gradients(
    call: LinearLossArguments | LinearTokenArguments,
    logits_gradient: Callable[[torch.Tensor], torch.Tensor],
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias from that of the logits; differentiable."""
    h, w, logits = logits_of(call)
    ignored = (call.target == call.ignore_index).unsqueeze(-1)
    h = h.masked_fill(ignored, 0.0)  # whatever it holds, of which 0 times may be NaN
    grad = logits_gradient(logits)
    rows, dtype = as_matrix(grad), call.weight.dtype
    grad_hidden = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_hidden = (grad @ w).masked_fill(ignored, 0.0).to(call.hidden.dtype).contiguous()
    if output_mask[1]:
        grad_weight = (rows.t() @ as_matrix(h)).to(dtype).contiguous()
    if output_mask[2]:
        grad_bias = rows.sum(0).to(dtype)
    return grad_hidden, grad_weight, grad_bias


def _shard(hidden: Any, reduction: str) -> list[Sharding]:
    """Rows are independent, their sum and count are partial sums; parameters are replicated."""
    rules: list[Sharding] = [([REPLICATE] * 4, [REPLICATE] * 4)]
    for dim in range(hidden.ndim - 1):
        loss = dim if reduction == "none" else PARTIAL
        rules.append(([loss, PARTIAL, dim, dim], [dim, REPLICATE, dim, REPLICATE]))
    return rules


_OP = define_op(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int ignore_index,"
    " float label_smoothing, float z_loss, float softcap, str reduction, int chunk_size,"
    " bool keep_logits, int all_classes) -> (Tensor loss, Tensor count, Tensor statistics,"
    " Tensor logits)",
    contract={
        "hidden": "T [*rows, features]",
        "weight": "T [classes, features]",
        "classes": "classes >= 1",
        "target": "int64 [*rows]",
        "bias": "T [classes]",
        "loss": "stat(T) [*rows] | []",
        "count": "stat(T) []",
        "statistics": "stat(T) [*rows, 2]",
        "logits": "stat(T) [*rows, classes if keep_logits else 0]",
        "label_smoothing": "0 <= label_smoothing <= 1",
        "z_loss": "0 <= z_loss < inf",
        "softcap": "0 <= softcap < inf",
        "reduction": ("none", "sum"),
        "chunk_size": "chunk_size >= 1",
        "all_classes": "all_classes >= 0",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("hidden", "weight", "bias"),
        outputs=("loss",),
        saves=("hidden", "weight", "target", "bias", "statistics", "logits"),
        reference=_backward,
    ),
    autocast="lower",
    triton="fusedops.kernels.linear_cross_entropy",
    shard=_shard,
)
