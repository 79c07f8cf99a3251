"""cross_entropy and token_logprobs in Triton: sums of rows, gradient of the logits, launchers.

Forward: a program per row reads it once. Exponentials are summed relative to a guess of the row's
maximum, that of its first block, so that the loop has one exponential an element and no reduction
across threads; a row whose maximum lies far above the guess (2^90 in the sum) is read again. The
term of the maximum is kept separate from the sum, so that a loss near zero keeps its digits.

A row may come in pieces of the classes (``linear_cross_entropy``): its sums are then carried in
four numbers per row. For token_logprobs (``TOKENS``) the third of them is the sum of
``exp(y - largest) * (y - largest)``, and a row is also read again where the guess would cost the
entropy digits.

Backward: tiles of one row, the logits once and their gradient once, row constants from memory.
Losses are added by one program in a fixed order. No atomics: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops.kernels import _launch
from fusedops.kernels._arguments import LossArguments, LossOptions, of_backward
from fusedops.kernels._device import LOG2E, exp, reciprocal
from fusedops.kernels._triton_version import at_least

_BLOCK = 4096
_OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
_SUM_BLOCK = 1024
# What exp makes 0, and a factor of that 0 may be: of a class of logit -inf nothing is left.
VANISHED = tl.constexpr(-1000.0)


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr, dtype: tl.constexpr):
    """Return ``softcap * tanh(x / softcap)`` and the derivative, or ``x``; it came in ``dtype``."""
    if not CAPPED:
        return x, 1.0
    elif dtype == tl.float32:
        u = x * (1.0 / softcap)
        t = exp(-2.0 * tl.abs(u))
        r = reciprocal(1.0 + t)
        large = tl.where(x < 0.0, -(1.0 - t) * r, (1.0 - t) * r)
        # Near zero 1 - t cancels: a polynomial, to 1.4e-8.
        square = u * u
        p = 0.0171350066 * square - 0.0529860753
        p = p * square + 0.133247793
        p = p * square - 0.333330694
        p = p * square + 0.999999987
        value = tl.where(tl.abs(u) < 0.5, u * p, large)
        return softcap * value, 4.0 * t * r * r
    else:
        # Right to 1e-7 of softcap; what is capped was rounded to half precision before.
        r = reciprocal(1.0 + tl.exp2(x * (2.0 * LOG2E / softcap)))
        return softcap - (2.0 * softcap) * r, 4.0 * r * (1.0 - r)


@triton.jit
def _load_y(x_ptr, col, num_cols, softcap, cooling, CAPPED: tl.constexpr, TOKENS: tl.constexpr):
    """Return ``y`` at columns, -inf outside; ``cooling`` is the inverse temperature."""
    y = _load_capped(x_ptr, col, num_cols, softcap, CAPPED)
    if TOKENS:
        y *= cooling
    return y


@triton.jit
def _load_capped(x_ptr, col, num_cols, softcap, CAPPED: tl.constexpr):
    """Return capped logits at columns, -inf outside."""
    mask = col < num_cols
    if CAPPED:
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        y, _ = _capped(x, softcap, CAPPED, x_ptr.dtype.element_ty)
        return tl.where(mask, y, float("-inf"))
    else:
        return tl.load(x_ptr + col, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _sum_row(
    x_ptr,
    num_cols,
    guess,
    softcap,
    cooling,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return sum exp(y - guess), the maximum, and what ``SMOOTH`` or ``TOKENS`` needs or 0.

    That is sum (y - guess), or sum exp(y - guess) * (y - guess).
    """
    total = tl.zeros((BLOCK,), tl.float32)
    values = tl.zeros((BLOCK,), tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, num_cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        y = _load_y(x_ptr, col, num_cols, softcap, cooling, CAPPED, TOKENS)
        term = exp(y - guess)
        total += term
        largest = tl.maximum(largest, y)
        if TOKENS:
            values += term * tl.maximum(y - guess, VANISHED)
        if SMOOTH:
            values += tl.where(col < num_cols, y - guess, 0.0)
    return tl.sum(total, axis=0), tl.max(largest, axis=0), tl.sum(values, axis=0)


@triton.jit
def _sums_kernel(
    x_ptr,
    target_ptr,
    loss_ptr,
    statistics_ptr,
    largest_ptr,
    others_ptr,
    values_ptr,
    label_ptr,
    num_cols,
    num_classes,
    all_classes,
    first_class,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    cooling,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Of classes first_class ... first_class + num_cols. The state of a row between pieces: its
    # maximum, the sum of all exponentials but the maximum's and the sum of y, both relative to it,
    # and y_target.
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    target = tl.load(target_ptr + row)
    WIDTH: tl.constexpr = 4 if TOKENS else 2
    statistics = statistics_ptr + WIDTH * tl.cast(row, tl.int64)
    if target == ignore_index:
        if LAST:
            tl.store(loss_ptr + row, 0.0)
            for number in tl.static_range(WIDTH):
                tl.store(statistics + number, 0.0)
            if TOKENS:
                tl.store(loss_ptr + num_rows + row, 0.0)
                tl.store(loss_ptr + 2 * num_rows + row, 0.0)
    else:
        x_row = x_ptr + tl.cast(row, tl.int64) * num_cols
        y = _load_y(x_row, tl.arange(0, BLOCK), num_cols, softcap, cooling, CAPPED, TOKENS)
        guess = tl.max(y, axis=0)
        guess = tl.where(guess > float("-inf"), guess, 0.0)
        total, largest, values = _sum_row(
            x_row, num_cols, guess, softcap, cooling, CAPPED, SMOOTH, TOKENS, BLOCK
        )
        # Also where the first block is all -inf and the guess 0 says nothing.
        FAR: tl.constexpr = 8.0 if TOKENS else 60.0
        if (largest > float("-inf")) & (tl.abs(largest - guess) > FAR):
            guess = largest
            total, largest, values = _sum_row(
                x_row, num_cols, guess, softcap, cooling, CAPPED, SMOOTH, TOKENS, BLOCK
            )
        # Without the maximum's own term, which is 1 relative to itself. A NaN stays.
        own = exp(largest - guess)
        others = tl.where(own > 0.0, (total - own) / own, total)
        others = tl.where(others < 0.0, 0.0, others)
        if TOKENS:
            values = tl.where(own > 0.0, (values + (guess - largest) * total) / own, values)
        if SMOOTH:
            values += tl.where(largest > float("-inf"), guess - largest, 0.0) * num_cols
        column = target - first_class
        here = (column >= 0) & (column < num_cols)
        label = tl.load(x_row + column, mask=here, other=0.0).to(tl.float32)
        label, _ = _capped(label, softcap, CAPPED, x_ptr.dtype.element_ty)
        if TOKENS:
            label *= cooling
        if not FIRST:
            before = tl.load(largest_ptr + row)
            others_before = tl.load(others_ptr + row)
            label = tl.where(here, label, tl.load(label_ptr + row))
            # The smaller maximum and its others join the others. (-inf) - (-inf) is no share.
            above = before > largest
            some = tl.minimum(before, largest) > float("-inf")
            gap = before - largest
            share = tl.where(some, tl.exp(-tl.abs(gap)), 0.0)
            if TOKENS:
                # The sum relative to the smaller maximum becomes one relative to the larger.
                gap = tl.where(some, gap, 0.0)
                values_before = tl.load(values_ptr + row)
                values = tl.where(
                    above,
                    values_before + share * (values - gap * (1.0 + others)),
                    values + share * (values_before + gap * (1.0 + others_before)),
                )
            others = tl.where(
                above,
                others_before + (others + 1.0) * share,
                others + (others_before + 1.0) * share,
            )
            if SMOOTH:
                gap = tl.where(some, gap, 0.0)
                values += tl.load(values_ptr + row) + tl.minimum(gap, 0.0) * first_class
                values -= tl.maximum(gap, 0.0) * num_cols
            largest = tl.maximum(before, largest)
        if LAST:
            # log(1 + others), and the maximum taken off the target's logit before it is added: a
            # loss near zero keeps its digits.
            spread = tl.where(others < 1e-3, others - 0.5 * others * others, tl.log(1.0 + others))
            if TOKENS:
                spread = tl.where(largest > float("-inf"), spread, float("nan"))
            lse = largest + spread
            mean = values / (1.0 + others)
            loss = tl.where(target >= 0, largest - label, 0.0)
            if SMOOTH:
                loss = (1.0 - smoothing) * loss - smoothing * (values / all_classes)
            loss += spread
            loss += z_loss * lse * lse
            # -1, where the classes are a part of all: one of another part.
            inside = (target < num_classes) & (
                (target >= 0) | ((target == -1) & (all_classes != num_classes))
            )
            loss = tl.where(inside, loss, float("nan"))
            tl.store(loss_ptr + row, -loss if TOKENS else loss)
            tl.store(statistics, largest)
            tl.store(statistics + 1, 1.0 + others)
            if TOKENS:
                tl.store(loss_ptr + num_rows + row, spread - mean)
                tl.store(loss_ptr + 2 * num_rows + row, lse)
                tl.store(statistics + 2, mean)
                # NaN among the others is in their sum alone.
                hit = (target >= 0) & (label >= largest) & (spread == spread)
                tl.store(statistics + 3, hit.to(tl.float32))
        else:
            tl.store(largest_ptr + row, largest)
            tl.store(others_ptr + row, others)
            tl.store(values_ptr + row, values)
            tl.store(label_ptr + row, label)


@triton.jit
def _total_kernel(
    loss_ptr, target_ptr, total_ptr, count_ptr, num_rows, ignore_index, BLOCK: tl.constexpr
):
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)  # 64 bits would spill a value under Triton 3.6
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < num_rows
        target = tl.load(target_ptr + row, mask=mask, other=0)
        count += (mask & (target != ignore_index)).to(tl.int32)
        total += tl.load(loss_ptr + row, mask=mask, other=0.0)
    tl.store(total_ptr, tl.sum(total, axis=0))
    tl.store(count_ptr, tl.sum(count, axis=0).to(tl.float32))


@triton.jit
def _backward_kernel(
    x_ptr,
    target_ptr,
    statistics_ptr,
    dloss_ptr,
    dx_ptr,
    dloss_stride,
    num_cols,
    num_classes,
    all_classes,
    first_class,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    cooling,
    CAPPED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < num_cols
    offset = tl.cast(row, tl.int64) * num_cols + col
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(dx_ptr + offset, tl.zeros((BLOCK,), dx_ptr.dtype.element_ty), mask=mask)
    else:
        statistics = statistics_ptr + (4 if TOKENS else 2) * tl.cast(row, tl.int64)
        largest, total = tl.load(statistics), tl.load(statistics + 1)
        dloss = tl.load(dloss_ptr + tl.cast(row, tl.int64) * dloss_stride)
        # Outside the classes: NaN, as the loss is.
        inside = (target < num_classes) & (
            (target >= 0) | ((target == -1) & (all_classes != num_classes))
        )
        dloss = tl.where(inside, dloss, float("nan"))
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y, slope = _capped(x, softcap, CAPPED, x_ptr.dtype.element_ty)
        if TOKENS:
            # Of entropy and log-sum-exp; dloss is that of the log-probability.
            num_rows = tl.num_programs(0)
            of_entropy = tl.load(dloss_ptr + num_rows + row)
            of_lse = tl.load(dloss_ptr + 2 * num_rows + row)
            shifted = y * cooling - largest
            beyond = tl.maximum(shifted, VANISHED) - tl.load(statistics + 2)
            share = exp(shifted) * reciprocal(total)
            dx = share * (of_lse - dloss - of_entropy * beyond)
            dx = tl.where(col == target - first_class, dx + dloss, dx) * slope * cooling
        else:
            scale = (1.0 + 2.0 * z_loss * (largest + tl.log(total))) * reciprocal(total)
            dx = exp(y - largest) * scale - smoothing / all_classes
            dx = tl.where(col == target - first_class, dx - (1.0 - smoothing), dx)
            dx = dx * slope * dloss
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Pieces:
    """Sums the rows of logits that come in pieces of the classes.

    ``num_classes`` is that of all pieces together; ``all_classes`` is more where these are a part
    of the classes. ``several`` is whether more than one piece will come. With ``tokens`` the result
    is that of token_logprobs.
    """

    def __init__(
        self,
        target: torch.Tensor,
        num_classes: int,
        options: LossOptions,
        *,
        several: bool = False,
        all_classes: int | None = None,
        tokens: bool = False,
    ) -> None:
        self.target, self.num_classes, self.options = target, num_classes, options
        self._tokens = tokens
        self._all_classes = num_classes if all_classes is None else all_classes
        rows = target.numel()
        self.loss = target.new_empty((3, rows) if tokens else rows, dtype=torch.float32)
        self._statistics = self.loss.new_empty((rows, 4 if tokens else 2))
        self._state = self.loss.new_empty((4, rows if several else 1))

    def add(self, logits: torch.Tensor, first_class: int) -> None:
        """Add a piece ``[rows, classes of the piece]``, dense; pieces come in order."""
        rows, num_cols = logits.shape
        if rows == 0:
            return
        capped, smooth = self.options.softcap > 0.0, self.options.label_smoothing > 0.0
        tensors = (logits, self.target, self.loss, self._statistics, *self._state)
        classes = (num_cols, self.num_classes, self._all_classes, first_class)
        flags = {"CAPPED": capped, "SMOOTH": smooth, "TOKENS": self._tokens}
        flags["FIRST"] = first_class == 0
        flags["LAST"] = first_class + num_cols == self.num_classes
        launch = _sums_launch(num_cols, smooth=smooth or self._tokens, capped=capped)
        _sums_kernel[(rows,)](*tensors, *classes, *self.options, **flags, **launch)

    def finish(
        self, shape: Sequence[int], reduction: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return loss, count and statistics as the ops do; ``shape`` is the target's."""
        total, count = self.loss.new_empty(()), self.loss.new_empty(())
        tensors = (self.loss, self.target, total, count)
        numbers = (self.target.numel(), self.options.ignore_index)
        _total_kernel[(1,)](*tensors, *numbers, BLOCK=_SUM_BLOCK, **_OPTIONS)
        loss = self.loss.view(shape) if reduction == "none" else total
        return loss, count, self._statistics.view(*shape, 2)

    def finish_tokens(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and statistics as token_logprobs does; ``shape`` is the target's."""
        return self.loss.view(3, *shape), self._statistics.view(*shape, 4)


def logits_gradient(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    *others: Any,
    options: LossOptions,
    tokens: bool = False,
) -> None:
    """Write the gradient of a piece of logits ``[rows, classes of the piece]``.

    ``grad_loss`` is one number or ``[rows]``, with ``tokens`` ``[3, rows]``; ``others`` are target,
    statistics and where the gradient is written, which may be ``logits``, all dense; then how many
    classes there are, how many all ranks have, and the first one of the piece.
    """
    rows, num_cols = logits.shape
    if rows == 0:
        return
    block = _block(num_cols)
    target, statistics, out, *classes = others
    tensors = (logits, target, statistics, grad_loss, out)
    stride = 1 if grad_loss.dim() > 0 else 0
    launch = {"CAPPED": options.softcap > 0.0, "TOKENS": tokens, "BLOCK": block}
    launch |= _options(num_cols)
    grid = (rows, triton.cdiv(num_cols, block))
    _backward_kernel[grid](*tensors, stride, num_cols, *classes, *options, **launch)


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LossArguments(*args)
    x, target = dense_matrix(call.logits), call.target
    with _launch.device_of(x):
        pieces = Pieces(target.reshape(-1), x.shape[1], call.options)
        pieces.add(x, 0)
        loss, count, statistics = pieces.finish(target.shape, call.reduction)
        if call.reduction == "mean":
            loss = loss / count
        return loss.to(call.dtype), count, statistics


def backward(*args: Any) -> torch.Tensor | None:
    (grad_loss,), call, (statistics, count), output_mask = of_backward(LossArguments, args)
    if not output_mask[0]:
        return None
    x = dense_matrix(call.logits)
    grad, classes = torch.empty_like(x), x.shape[1]
    with _launch.device_of(x):
        incoming = row_gradients(grad_loss, call.reduction)
        incoming = incoming / count if call.reduction == "mean" else incoming
        tensors = (incoming, x, call.target.reshape(-1), statistics.contiguous(), grad)
        logits_gradient(*tensors, classes, classes, 0, options=call.options)
    return grad.view(call.logits.shape)


def dense_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a dense matrix ``[rows, last dim]``."""
    return tensor.contiguous().view(tensor.shape[:-1].numel(), tensor.shape[-1])


def row_gradients(grad_loss: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the incoming gradient in float32: ``[rows]``, dense, or one number."""
    grad = grad_loss.float()
    return grad.reshape(-1).contiguous() if reduction == "none" else grad


def _block(num_cols: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(num_cols))


def _options(num_cols: int) -> dict[str, Any]:
    """Launch options: 16 elements a thread."""
    return _OPTIONS | {"num_warps": max(1, _block(num_cols) // 512)}


def _sums_launch(num_cols: int, *, smooth: bool, capped: bool) -> dict[str, Any]:
    """Block and launch options of the sums: what smoothing adds would spill in large blocks.

    With both options a thread has 8 elements; on sm_100, Triton 3.8 spills 16 of capped logits.
    """
    block = min(_block(num_cols), 2048 if smooth else _BLOCK)
    few = capped and (smooth or (at_least(3, 8) and not at_least(3, 9)))
    warps = max(1, block // (256 if few else 512))
    return {"BLOCK": block} | _OPTIONS | {"num_warps": warps}
