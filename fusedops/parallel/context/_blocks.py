"""The kernels of attention on blocks of scores, and the merge of their results.

A block's output is normalized by its own sum of exponentials. ``Attended`` has outputs and sums in
the dtype of statistics and merges one block after another, so that rounding to half precision
happens once, at the end. The sum has two parts, the largest score and the logarithm of the sum
relative to it, as in the kernels: one number is not precise enough for both where scores are large.

The backward of a block is the kernel's own, with the output and the sum of the complete row: the
recomputed probabilities, and the row's ``sum(output * grad)``, are then those of the row. The
reference recomputes everything from the block alone, and gets the block's own share of the
gradient instead.

Shapes: ``query [B, H, Sq, D]``, ``key [B, Hkv, Sk, D]``, ``value [B, Hkv, Sk, Dv]``, rows
``[B, H, Sq]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._core import backends, dtypes
from fusedops.parallel.context._checks import Request
from fusedops.parallel.context.layout import Range
from fusedops.parallel.context.plan import AttentionBlock, ContextCall

LOG2E = 1.0 / math.log(2.0)


class Incoming(NamedTuple):
    """What the backward of each block reads of the complete rows."""

    grad_output: Tensor
    grad_lse: Tensor | None
    output: Tensor
    remainder: Tensor
    parts: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Incoming:
        """Return ``function`` of each tensor that is not ``None`` or empty."""
        grad_lse = None if self.grad_lse is None else function(self.grad_lse)
        remainder = function(self.remainder) if self.remainder.numel() else self.remainder
        rest = function(self.output), remainder, function(self.parts)
        return Incoming(function(self.grad_output), grad_lse, *rest)

    @property
    def unrounded(self) -> Tensor:
        """The output in the dtype of statistics, before rounding."""
        wide = self.output.to(self.parts.dtype)
        return wide + self.remainder if self.remainder.numel() else wide


class Attended:
    """Attention over the keys so far.

    Attributes:
        output: ``[B, H, Sq, Dv]``, in the dtype of statistics.
        parts: ``[B, H, Sq, 2]``: the largest score and the logarithm of the sum relative to it,
            in units of log2; minus infinity and 0 where nothing was attended.
    """

    def __init__(self, query: Tensor, value_size: int) -> None:
        wide = dtypes.statistics_dtype(query.dtype)
        batch, heads, rows, _ = query.shape
        self._all_rows, self._empty = ((0, rows),), True
        self.output = query.new_zeros((batch, rows, heads, value_size), dtype=wide).transpose(1, 2)
        self.parts = query.new_zeros((batch, heads, rows, 2), dtype=wide)
        self.parts[..., 0] = -torch.inf

    def add(self, rows: tuple[Range, ...], output: Tensor, parts: Tensor) -> None:
        """Merge attention of some of the rows over other keys."""
        if self._empty and rows == self._all_rows:
            self.output, self.parts, self._empty = output, parts, False
            return
        self._empty = False
        old, old_parts = take(self.output, rows), take(self.parts, rows)
        top = torch.maximum(old_parts[..., 0], parts[..., 0])
        origin = torch.where(top == -torch.inf, 0.0, top)
        first = torch.exp2(old_parts[..., 0] - origin + old_parts[..., 1])
        second = torch.exp2(parts[..., 0] - origin + parts[..., 1])
        total = first + second
        total = torch.where(total == 0, 1.0, total)
        merged = old * (first / total).unsqueeze(-1) + output * (second / total).unsqueeze(-1)
        _put(self.output, rows, merged)
        _put(self.parts, rows, torch.stack([top, torch.log2(total)], -1))

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge one more score per head, of a key without value."""
        scores = sinks.view(1, -1, 1).expand(self.parts.shape[:-1])
        self.add(self._all_rows, torch.zeros_like(self.output), _one_part(scores))


def lse_of(parts: Tensor) -> Tensor:
    """Return the log-sum-exp ``[B, H, Sq]`` of its two parts."""
    return parts.sum(-1) / LOG2E


def take(tensor: Tensor, rows: tuple[Range, ...], dim: int = 2) -> Tensor:
    """Return the tokens in ``rows``: a view where they are one range."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in rows or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _put(into: Tensor, rows: tuple[Range, ...], values: Tensor) -> None:
    sizes = [stop - start for start, stop in rows]
    for (start, stop), part in zip(rows, values.split(sizes, 2), strict=True):
        into[:, :, start:stop] = part


def add_to(into: Tensor, rows: tuple[Range, ...], values: Tensor) -> None:
    """Add ``values`` to the tokens in ``rows``."""
    sizes = [stop - start for start, stop in rows]
    for (start, stop), part in zip(rows, values.split(sizes, 2), strict=True):
        into[:, :, start:stop] += part


def forward(call: ContextCall, a: Request, attended: Attended) -> None:
    """Merge the blocks of a call into ``attended``; ``a`` has its queries, keys and values."""
    if len(call.blocks) == 1:
        inputs, numbers, shift = _dense(call.blocks[0], a)
        output, lse, remainder, parts = torch.ops.fusedops.attention(*inputs, *numbers)
        parts = parts if parts.numel() else _one_part(lse)
        if shift is not None:
            parts = _shifted(parts, -shift)
    else:
        packed = _Packed(call, a)
        output, lse, remainder = torch.ops.fusedops.attention_varlen(
            *packed.tensors, *packed.numbers
        )
        output, lse, remainder = map(packed.rows_of, (output, lse, remainder))
        parts = _one_part(lse)
    wide = output.to(parts.dtype)
    attended.add(call.rows, wide + remainder if remainder.numel() else wide, parts)


def backward(call: ContextCall, a: Request, incoming: Incoming) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a call's queries, keys and values, in the order of its blocks."""
    here = incoming.map(lambda tensor: take(tensor, call.rows))
    if len(call.blocks) > 1:
        return _Packed(call, a).backward(here)
    inputs, numbers, shift = _dense(call.blocks[0], a)
    parts = here.parts if shift is None else _shifted(here.parts, shift)
    needed = [True, True, True, False, False]
    saved = (here.output, lse_of(parts), here.remainder, parts)
    args = (here.grad_output, here.grad_lse, *inputs, *saved, *numbers, needed)
    if backends.resolve("attention", *args, backward=True).backend == "torch":
        output, lse, remainder, own = torch.ops.fusedops.attention(*inputs, *numbers)
        grads = _own_share(here, output, _one_part(lse), parts)
        args = (*grads, *inputs, output, lse, remainder, own, *numbers, needed)
    grad_q, grad_k, grad_v, *_ = torch.ops.fusedops.attention_backward(*args)
    return grad_q, grad_k, grad_v


class _Packed:
    """The blocks of a call one after another, as ``attention_varlen`` takes them."""

    def __init__(self, call: ContextCall, a: Request) -> None:
        self.batch = a.query.shape[0]
        sides = zip(*((block.rows, block.columns) for block in call.blocks), strict=True)
        sizes = [tuple(stop - start for start, stop in side) for side in sides]
        ends = [_ends(side * self.batch, a.query.device) for side in sizes]
        longest = [max(side) for side in sizes]
        tokens = map(self._tokens_of, a[:3])
        slopes = a.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.repeat_interleave(len(call.blocks), 0)
        self.tensors = (*tokens, *ends, slopes, None, self._seed(a.seed, a.query.shape[2]))
        self.numbers = (*longest, *_numbers(call.blocks[0], a))

    def _seed(self, seed: Tensor | None, rows: int) -> Tensor | None:
        """Return the seed with an index for each token of the batch."""
        if seed is None or self.batch == 1:
            return seed
        batch = torch.arange(self.batch, device=seed.device) * seed[3]
        begins, columns = seed[5 : 5 + rows], seed[5 + rows :]
        begins = (batch[:, None] + begins).flatten()
        return torch.cat((seed[:5], begins, columns.repeat(self.batch)))

    def backward(self, here: Incoming) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        grads: tuple[Any, ...] = (here.grad_output, here.grad_lse)
        needed = [True, True, True, False]
        lse = lse_of(here.parts)
        saved = [*map(self._tokens_of, (here.output, lse, here.remainder))]
        args = (*map(self._tokens_of, grads), *self.tensors, *saved, *self.numbers, needed)
        if backends.resolve("attention_varlen", *args, backward=True).backend == "torch":
            saved = list(torch.ops.fusedops.attention_varlen(*self.tensors, *self.numbers))
            output, own = map(self.rows_of, saved[:2])
            grads = _own_share(here, output, _one_part(own), here.parts)
            args = (*map(self._tokens_of, grads), *self.tensors, *saved, *self.numbers, needed)
        results = torch.ops.fusedops.attention_varlen_backward(*args)
        grad_q, grad_k, grad_v = map(self.rows_of, results[:3])
        return grad_q, grad_k, grad_v

    def _tokens_of(self, tensor: Any) -> Any:
        """Return ``[B, H, S, D]`` as ``[B * S, H, D]``, and ``[B, H, S]`` as ``[H, B * S]``."""
        if tensor is None or tensor.dim() == 1:
            return tensor
        if tensor.dim() == 3:
            return tensor.transpose(0, 1).flatten(1)
        return tensor.transpose(1, 2).flatten(0, 1)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Undo ``_tokens_of``."""
        if tensor.dim() == 1:
            return tensor
        if tensor.dim() == 2:
            return tensor.unflatten(1, (self.batch, -1)).transpose(0, 1)
        return tensor.unflatten(0, (self.batch, -1)).transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _ends(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences of these sizes end, from 0 on; cached for all layers of a model."""
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0).to(device)


def _own_share(here: Incoming, output: Tensor, own: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a block's own output and log-sum-exp.

    The weight of the block in its rows is ``w = exp(lse_block - lse)``.
    """
    seen = parts[..., 0] > -torch.inf
    weight = torch.exp2(torch.where(seen, own.sum(-1) - parts.sum(-1), -torch.inf))
    grad = here.grad_output.to(weight.dtype)
    grad_lse = (grad * (output.to(weight.dtype) - here.unrounded)).sum(-1)
    if here.grad_lse is not None:
        grad_lse = grad_lse + here.grad_lse
    return (grad * weight.unsqueeze(-1)).to(output.dtype), grad_lse * weight


def _numbers(block: AttentionBlock, a: Request) -> tuple[Any, ...]:
    """Return the arguments of both kernels that are no tensors, of one block."""
    return a.dropout_p, a.scale, block.left, block.right, a.softcap, True


def _dense(
    block: AttentionBlock, a: Request
) -> tuple[tuple[Any, ...], tuple[Any, ...], Tensor | None]:
    """Return the tensors and numbers of ``attention`` for a block, and the shift of ``_places``."""
    mask, slopes, shift = _places(block, a)
    return (*a[:3], mask, slopes, None, a.seed), _numbers(block, a), shift


def _places(
    block: AttentionBlock, a: Request
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return additive mask, slopes and shift that make ALiBi of a block.

    Where queries and keys are the same tokens the kernel's own slopes do. Elsewhere all keys are on
    one side of all queries, and ``|j - i|`` is a distance along the keys, from the block's edge,
    which a mask ``[H, 1, Sk]`` adds, and one along the queries: that one is the same for a whole
    row, drops out of the softmax, and is the shift ``[H, Sq]`` (in units of log2) by which the
    kernel's log-sum-exp is too large.
    """
    slopes = a.alibi_slopes
    if slopes is None or block.distance == 0:
        return None, slopes, None
    rows = torch.arange(a.query.shape[2], device=slopes.device)
    width = block.columns[1] - block.columns[0]
    columns = torch.arange(width, device=slopes.device)
    if block.distance > 0:
        rows, columns = rows + block.distance - (width - 1), width - 1 - columns
    else:
        rows = -block.distance - rows
    slopes = (slopes if slopes.dim() == 2 else slopes.unsqueeze(0)).unsqueeze(-1)
    mask = (-slopes * columns).unsqueeze(2)
    return mask, None, slopes * rows * LOG2E


def _shifted(parts: Tensor, shift: Tensor) -> Tensor:
    return torch.stack([parts[..., 0] + shift, parts[..., 1].expand_as(parts[..., 0])], -1)


def _one_part(lse: Tensor) -> Tensor:
    return torch.stack([lse * LOG2E, torch.zeros_like(lse)], -1)
