"""Shared checks and formulas of the attention ops: scores with every option, softmax, backward.

Everything here is dense eager torch in float32 (float64 for float64): the specification. Shapes:
``query [B, Hq, Sq, D]``, ``key [B, Hkv, Sk, D]``, ``value [B, Hkv, Sk, Dv]``; query head ``h``
reads key head ``h // (Hq / Hkv)``. Query ``i`` may attend key ``j`` if

    -window_left <= j - i - offset <= window_right

where a negative window is unbounded; ``offset`` is 0 (aligned to the upper left, as torch's
``is_causal``) or ``Sk - Sq`` (aligned to the lower right). The order of the options is

    score = query . key * scale
    score = softcap * tanh(score / softcap)
    score = score - slope * |j - i - offset| + attn_mask

and a sink is one more score of the row, of a key whose value is zero.
"""

from __future__ import annotations

import contextlib
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox
from fusedops._core.layouts import heads_inside
from fusedops._core.sharding import REPLICATE, Placement
from fusedops._core.tracing import is_traced, plain_size


@dataclass(frozen=True)
class AttentionOptions:
    scale: float
    window_left: int
    window_right: int
    softcap: float
    offset: int = 0


@dataclass(frozen=True)
class Softmax:
    """Scores after all options, their softmax and its logarithmic denominator."""

    tanh: torch.Tensor | None  # ``tanh(score / softcap)``, ``None`` without softcap
    probabilities: torch.Tensor  # ``[B, Hq, Sq, Sk]``; rows with nothing to attend to are 0
    sink: torch.Tensor | None  # probability of the sink ``[B, Hq, Sq]``, ``None`` without
    lse: torch.Tensor  # ``[B, Hq, Sq]``, minus infinity for rows with nothing to attend to
    top: torch.Tensor  # ``[B, Hq, Sq]``, the largest score, likewise
    total: torch.Tensor  # ``[B, Hq, Sq]``, the sum of ``exp(score - top)``, 1 for rows with nothing


def per_query_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key heads (dim 1) so that there is one for each query head."""
    groups = heads // max(1, tensor.shape[1])
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def allowed(
    rows: int, columns: int, pattern: AttentionOptions, device: torch.device
) -> torch.Tensor | None:
    """Return which keys the window lets a query attend, ``[Sq, Sk]``, or ``None`` for all."""
    if pattern.window_left < 0 and pattern.window_right < 0:
        return None
    i = torch.arange(rows, device=device).unsqueeze(1)
    distance = torch.arange(columns, device=device) - i - pattern.offset
    inside = torch.ones((), dtype=torch.bool, device=device)
    if pattern.window_left >= 0:
        inside = inside & (distance >= -pattern.window_left)
    if pattern.window_right >= 0:
        inside = inside & (distance <= pattern.window_right)
    return inside


def softmax(*inputs: Any) -> Softmax:
    """Return scores and softmax, differentiable in ``query``, ``key``, ``attn_mask``, ``sinks``."""
    query, key, attn_mask, alibi_slopes, sinks, pattern = inputs
    accumulation = dtypes.statistics_dtype(query.dtype)
    rows, columns = query.shape[2], key.shape[2]
    q = query.to(accumulation)
    k = per_query_head(key.to(accumulation), query.shape[1])
    scores = q @ k.mT * pattern.scale
    tanh = None
    if pattern.softcap > 0:
        tanh = torch.tanh(scores / pattern.softcap)
        scores = pattern.softcap * tanh
    if alibi_slopes is not None:
        i = torch.arange(rows, device=q.device).unsqueeze(1) + pattern.offset
        distance = (torch.arange(columns, device=q.device) - i).abs()
        scores = scores - alibi_slopes.to(accumulation)[..., None, None] * distance
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(accumulation)
    masks = [allowed(rows, columns, pattern, q.device)]
    masks += [attn_mask] if attn_mask is not None and attn_mask.dtype == torch.bool else []
    for mask in masks:
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
    return _normalized(scores, tanh, sinks)


def _normalized(
    scores: torch.Tensor, tanh: torch.Tensor | None, sinks: torch.Tensor | None
) -> Softmax:
    # A sum of zero would make NaN of rows without keys, in second derivatives as well.
    if scores.shape[-1]:
        top = scores.detach().amax(-1)
    else:
        top = scores.new_full(scores.shape[:-1], -torch.inf)
    sink_scores = None
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype)[:, None].expand(top.shape)
        top = torch.maximum(top, sink_scores.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    exponentials = torch.exp(scores - top.unsqueeze(-1))
    total = exponentials.sum(-1)
    sink = None
    if sink_scores is not None:
        sink = torch.exp(sink_scores - top)
        total = total + sink
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    top = torch.where(empty, -torch.inf, top)
    probabilities = exponentials / total.unsqueeze(-1)
    sink = None if sink is None else sink / total
    return Softmax(tanh, probabilities, sink, top + torch.log(total), top, total)


def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, not rounded, the log-sum-exp and its parts (``keeps_parts``).

    ``keep`` is dropout's factor of each probability: 0, or that of the kept ones.
    """
    query, key, value, *options, keep, pattern = inputs
    normalized = softmax(query, key, *options, pattern)
    kept = normalized.probabilities if keep is None else normalized.probabilities * keep
    output = kept @ per_query_head(value.to(kept.dtype), query.shape[1])
    top = normalized.top / math.log(2.0)
    least = torch.finfo(top.dtype).min  # finite tops stay finite
    top = torch.where(normalized.top < least, top, top.clamp(min=least))
    parts = torch.stack([top, torch.log2(normalized.total)], -1)
    return output, normalized.lse, parts


def rounded(wide: torch.Tensor, dtype: torch.dtype, keep: bool) -> tuple[torch.Tensor, ...]:
    """Return ``wide`` in ``dtype``, and what the rounding took (empty unless ``keeps`` says so).

    The backward needs ``sum(output * grad_output)`` of each row. From the rounded output alone its
    error is three to four times that of eager attention, and goes into every score's gradient.
    """
    output = wide.to(dtype)
    if not keeps(dtype, keep):
        return output, output.new_empty(0)
    return output, (wide - output.to(wide.dtype)).to(dtype)


def keeps(dtype: torch.dtype, keep_remainder: bool) -> bool:
    """Return whether the output's remainder is kept: only where a half-precision one exists."""
    return keep_remainder and dtype in (torch.bfloat16, torch.float16)


def keeps_parts(dtype: torch.dtype, attn_mask: Any, keep_remainder: bool) -> bool:
    """Return whether the log-sum-exp is kept in two parts too: with an additive mask, or wide.

    Where all that a query may attend has a bias of -1e9, say, the log-sum-exp is so large that the
    sum vanishes in its rounding: the backward would take probabilities that sum to their number.
    Large scores do the same by degrees, which half precision does not show. The parts ``[..., 2]``
    are the row's maximum and the logarithm of the sum relative to it, in units of log2.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return keep_remainder
    return keep_remainder and attn_mask is not None and attn_mask.dtype != torch.bool


def records_graph_or_traces(*tensors: torch.Tensor | None) -> bool:
    """Return whether a graph is being recorded through one of ``tensors``.

    Always while ``torch.jit.trace`` runs: its graph serves with a gradient in view and without, and
    no backward can make again what is kept for it here.
    """
    if not torch.is_grad_enabled():
        return is_traced()
    return is_traced() or any(tensor is not None and tensor.requires_grad for tensor in tensors)


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value, attn_mask and sinks that are asked for.

    ``args`` are the gradients of output and log-sum-exp, those of ``forward``, and the mask.
    """
    grad_output, grad_lse, *inputs, output_mask = args
    query, key, value, attn_mask, alibi_slopes, sinks, keep, pattern = inputs
    normalized = softmax(query, key, attn_mask, alibi_slopes, sinks, pattern)
    p = normalized.probabilities
    heads = query.shape[1]
    grad = torch.zeros_like(p)
    grad_value = None
    if grad_output is not None:
        out = grad_output.to(p.dtype)
        wide_value = per_query_head(value.to(p.dtype), heads)
        grad = out @ wide_value.mT
        grad = grad if keep is None else grad * keep
    if output_mask[2]:
        grad_value = torch.zeros_like(value)
        if grad_output is not None:
            kept = p if keep is None else p * keep
            grad_value = _per_key_head(kept.mT @ out, value.shape[1]).to(value.dtype)
        grad_value = heads_inside(grad_value)
    delta = (p * grad).sum(-1)
    if grad_lse is not None:
        # A row without keys has no lse to differentiate.
        delta = delta - torch.where(normalized.lse == -torch.inf, 0.0, grad_lse.to(p.dtype))
    grad_scores = p * (grad - delta.unsqueeze(-1))
    grad_mask = grad_sinks = grad_query = grad_key = None
    if output_mask[3]:
        assert attn_mask is not None
        grad_mask = grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype).contiguous()
    if output_mask[4]:
        assert sinks is not None and normalized.sink is not None
        grad_sinks = (-normalized.sink * delta).sum((0, 2)).to(sinks.dtype)
    if normalized.tanh is not None:
        grad_scores = grad_scores * (1 - normalized.tanh.square())
    grad_scores = grad_scores * pattern.scale
    if output_mask[0]:
        grad_query = grad_scores @ per_query_head(key.to(p.dtype), heads)
        grad_query = heads_inside(grad_query.to(query.dtype))
    if output_mask[1]:
        grad_key = _per_key_head(grad_scores.mT @ query.to(p.dtype), key.shape[1])
        grad_key = heads_inside(grad_key.to(key.dtype))
    return grad_query, grad_key, grad_value, grad_mask, grad_sinks


def _per_key_head(grad: torch.Tensor, heads: int) -> torch.Tensor:
    return grad if heads == grad.shape[1] else grad.unflatten(1, (heads, -1)).sum(2)


def keep_factors(
    shape: tuple[int, ...],
    seed: torch.Tensor | None,
    dropout_p: float,
    like: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Return dropout's factors of the probabilities ``shape``, or ``None`` without dropout.

    They have the accumulation dtype and the device of ``like``. ``places`` is where rows and
    columns stand, for a seed with a place that has numbers for each; by default all that it has.
    """
    if dropout_p == 0.0:
        return None
    ones = like.new_ones(shape, dtype=dtypes.statistics_dtype(like.dtype))
    if seed is None or seed.numel() == 2:
        return philox.dropout(ones, seed, dropout_p)
    batch, heads, rows, columns = shape
    base, batch_stride, head_stride = seed[2:5]
    numbers = torch.arange(max(shape), device=seed.device)
    if places is None and seed.numel() > 5:
        places = seed[5 : 5 + rows], seed[5 + rows :]
    row, column = places or (numbers[:rows] * columns, numbers[:columns])
    first = base + numbers[:batch, None] * batch_stride + numbers[:heads] * head_stride
    index = first[..., None, None] + row[:, None] + column
    return philox.dropout(ones, seed, dropout_p, index)


def new_heads_inside(
    like: torch.Tensor, batch: int, heads: int, rows: int, size: int
) -> torch.Tensor:
    return like.new_empty(batch, rows, heads, size).transpose(1, 2)


def empty_heads_inside(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, size = tensor.shape
    return new_heads_inside(tensor, batch, heads, rows, size)


def option_placements(word: Placement, alibi_slopes: Any) -> list[Placement]:
    """Return those of slopes and sinks where the batch (0) or the heads (1) are sharded."""
    of_heads: Placement = 0 if word == 1 else REPLICATE
    per_sequence = alibi_slopes is not None and len(alibi_slopes.shape) == 2
    return [word if per_sequence else of_heads, of_heads]


def check_query(op: str, query: Any, **others: Any) -> None:
    """Raise unless ``query`` is a floating tensor, and keys and values are like it."""
    checks.tensor(op, "query", query)
    same = dtypes.autocast_dtype(query.device) is None
    for name, tensor in others.items():
        checks.like(op, name, tensor, "query", query, dtype=same)


def check_heads(op: str, names: tuple[str, str], query_heads: int, key_heads: int) -> None:
    if key_heads == 0 or query_heads % key_heads:
        expected = f"of a number of heads that {names[1]}'s number of heads, {key_heads}, divides"
        checks.fail(op, names[0], expected, query_heads)


def check_tokens(op: str, name: str, value: torch.Tensor, owner: str, key: torch.Tensor) -> None:
    if value.shape[:-1] != key.shape[:-1]:
        expected = (
            f"of shape [{', '.join(map(str, key.shape[:-1]))}, size], {owner}'s but for the size"
        )
        checks.fail(op, name, expected, list(value.shape))


def check_options(
    op: str,
    query: torch.Tensor,
    heads: int,
    batch: int,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    scale: Any,
) -> tuple[int, int, float, float]:
    """Raise unless the options fit; return window_left, window_right, softcap and scale."""
    size = plain_size(query.shape[-1])
    plain = window is None and softcap is None and alibi_slopes is None and sinks is None
    if plain and size:
        if scale is None:
            return -1, -1, 0.0, float(size**-0.5)
        checks.number(op, "scale", scale)
        return -1, -1, 0.0, float(scale)
    left, right = -1, -1
    if window is not None:
        pair = isinstance(window, (tuple, list)) and len(window) == 2
        if not pair:
            checks.fail(op, "window", "(left, right), of two ints", checks.shown(window))
        for bound in window:
            checks.integer(op, "each of window", bound, least=-1)
        left, right = window
    if softcap is not None:
        checks.positive(op, "softcap", softcap)
    if scale is not None:
        checks.number(op, "scale", scale)
    if alibi_slopes is not None:
        checks.like(op, "alibi_slopes", alibi_slopes, "query", query)
        if tuple(alibi_slopes.shape) != (heads,):
            shape = (batch, heads)
            checks.shape(op, "alibi_slopes", alibi_slopes, shape, f"one per head; or [{heads}]")
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise checks.UnsupportedError(
                f"{op}: alibi_slopes has no gradient; detach it, or give the bias as attn_mask"
            )
    if sinks is not None:
        checks.like(op, "sinks", sinks, "query", query)
        checks.shape(op, "sinks", sinks, (heads,), "one per query head")
    factor = float(scale) if scale is not None else (size**-0.5 if size else 1.0)
    return left, right, float(softcap or 0.0), factor


def check_sequences(op: str, name: str, lengths: torch.Tensor, total: int, longest: Any) -> None:
    """Raise unless ``lengths`` (``cu_seqlens``) cut ``total`` tokens into sequences.

    The values are looked at on the CPU only: on a GPU that would stop the host. There a wrong table
    is caught by an assertion on the device.
    """
    checks.index_tensor(op, name, lengths, dtypes=(torch.int32, torch.int64))
    if lengths.dim() != 1 or lengths.shape[0] < 1:
        checks.fail(op, name, "of shape [sequences + 1]", list(lengths.shape))
    if torch.compiler.is_compiling():
        return
    longest = _longest(op, "max_seqlen" + name.removeprefix("cu_seqlens"), longest)
    steps = lengths.diff()
    if lengths.device.type != "cpu":
        fine = (lengths[0] == 0) & (lengths[-1] == total) & (steps >= 0).all()
        message = f"{op}: {name} must rise from 0 to {total} by steps of at most {longest}"
        torch._assert_async(fine & (steps <= longest).all(), message)
    if not checks.readable(lengths):
        return
    values = lengths.tolist()
    if values[0] != 0 or values[-1] != total:
        checks.fail(op, name, f"from 0 to {total}, the number of tokens", values)
    for index, step in enumerate(steps.tolist()):
        if step < 0:
            checks.fail(op, name, "monotone", f"{values[index]} before {values[index + 1]}")
        if step > longest:
            what = f"cut into sequences of at most {longest} tokens (its max_seqlen)"
            checks.fail(op, name, what, f"sequence {index} of {step}")


def _longest(op: str, name: str, value: Any) -> Any:
    """Return a ``max_seqlen`` as an int: callers have it as a number of numpy or of torch, too."""
    if not isinstance(value, (bool, int, torch.SymInt)):
        with contextlib.suppress(TypeError):
            value = operator.index(value)
    checks.integer(op, name, value, least=0)
    return value


def autocast(query: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype where it is on: what torch does to its attention.

    Slopes, sinks and masks keep theirs: they enter the float32 scores.
    """
    dtype = dtypes.autocast_dtype(query.device)
    if dtype is None or query.dtype == torch.float64:
        return (query, *tensors)
    return tuple(tensor.to(dtype) for tensor in (query, *tensors))
