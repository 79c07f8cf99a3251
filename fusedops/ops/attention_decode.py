"""Attention of the newest tokens over a cache of keys and values: the step of generation.

The op has no gradient, because generation needs none.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.ops import _attention_math as formulas
from fusedops.ops._attention_math import AttentionOptions


def attention_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest tokens of each sequence to its part of a cache.

    Sequence ``n`` has ``cache_seqlens[n]`` keys, the last ``Sq`` of which are those of the queries
    themselves (they are in the cache already). Query ``i`` attends ``j <= i + cache_seqlens[n] -
    Sq``: causal, aligned to the lower right.

    Args:
        query: ``[B, H, Sq, D]``, or ``[B, H, D]`` for one new token; any floating dtype.
        key_cache: ``[B, Hkv, capacity, D]``, any strides, the dtype of ``query``; ``Hkv`` divides
            ``H``.
        value_cache: ``[B, Hkv, capacity, Dv]``.
        cache_seqlens: ``[B]`` int32 or int64: tokens in the cache, new ones included.
        scale: factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``; ``right`` must be -1 or 0, there are no later keys.
        softcap: bound of the scores: ``softcap * tanh(score / softcap)``.
        alibi_slopes: ``[H]`` or ``[B, H]``: adds ``-slope * |distance|``.
        sinks: ``[H]``: a score that is added to each row's denominator, as of a key without a
            value.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        The shape of ``query`` with ``Dv`` for ``D``, its dtype, laid out as ``[B, Sq, H, Dv]``;
        with ``return_lse`` also the log-sum-exp ``[B, H(, Sq)]`` in float32 (float64 for float64).

    Raises:
        ValueError: a shape, device or option does not fit; a length is negative or above the
            cache's capacity (on a GPU and in compiled code such a sequence's output is NaN).
        TypeError: an argument is no tensor, or its dtype does not fit.
        UnsupportedError: a gradient is asked for; call it under ``torch.no_grad()``.

    Note:
        Reads each key and value once, whatever the number of query heads that share them. Entries
        after the length are not read and may have any value. Float32 scores and sums; NaN and
        infinities as in ``attention``; deterministic. Under autocast all floating arguments are
        cast.

    Reference:
        Shazeer: Fast Transformer Decoding, arXiv:1911.02150.

    Example:
        >>> import torch, fusedops
        >>> cache = torch.arange(8.0).view(2, 1, 4, 1)
        >>> fusedops.attention_decode(torch.zeros(2, 1, 1), cache, cache, torch.tensor([2, 1]))
        tensor([[[0.5000]],
        <BLANKLINE>
                [[4.0000]]])
    """
    op = "attention_decode"
    checks.flag(op, "return_lse", return_lse)
    one = isinstance(query, torch.Tensor) and query.dim() == 3
    if one:
        query = query.unsqueeze(2)
    _check(query, key_cache, value_cache, cache_seqlens)
    batch, heads = query.size(0), query.size(1)
    left, right, cap, factor = formulas.check_options(
        op, query, heads, batch, window, softcap, alibi_slopes, sinks, scale
    )
    if right > 0:
        checks.fail(op, "window", "(left, 0) or (left, -1): there are no later keys", window)
    query, key_cache, value_cache = formulas.autocast(query, key_cache, value_cache)
    wide = dtypes.statistics_dtype(query.dtype)
    lengths = cache_seqlens if cache_seqlens.dtype == torch.int64 else cache_seqlens.to(torch.int64)
    slopes = alibi_slopes.to(wide) if alibi_slopes is not None else None
    sink_logits = sinks.to(wide) if sinks is not None else None
    options = (slopes, sink_logits, factor, left, cap)
    output, lse = _OP(query, key_cache, value_cache, lengths, *options)
    if one:
        output, lse = output.squeeze(2), lse.squeeze(2)
    return (output, lse) if return_lse else output


def _check(query: Any, key_cache: Any, value_cache: Any, cache_seqlens: Any) -> None:
    op = "attention_decode"
    if _fits(query, key_cache, value_cache, cache_seqlens):
        _check_lengths(cache_seqlens, key_cache.shape[2])
        return
    formulas.check_query(op, query, key_cache=key_cache, value_cache=value_cache)
    tensors = (("query", query), ("key_cache", key_cache), ("value_cache", value_cache))
    for name, tensor in tensors:
        if tensor.dim() != 4:
            checks.fail(op, name, "of 4 dims, [batch, heads, tokens, size]", list(tensor.shape))
        if tensor.requires_grad and torch.is_grad_enabled():
            raise checks.UnsupportedError(
                f"{op}: {name} requires a gradient, and this op has none: call it under "
                "torch.no_grad(), or use fusedops.attention"
            )
    if key_cache.shape[3] != query.shape[3]:
        checks.fail(op, "key_cache", f"of head size {query.shape[3]}, query's", key_cache.shape[3])
    if key_cache.shape[0] != query.shape[0]:
        checks.fail(op, "key_cache", f"of batch {query.shape[0]}, query's", key_cache.shape[0])
    formulas.check_tokens(op, "value_cache", value_cache, "key_cache", key_cache)
    formulas.check_heads(op, ("query", "key_cache"), query.shape[1], key_cache.shape[1])
    name = "cache_seqlens"
    checks.index_tensor(op, name, cache_seqlens, dtypes=(torch.int32, torch.int64))
    if cache_seqlens.device != query.device:
        checks.fail(op, name, f"on {query.device}, the device of query", cache_seqlens.device)
    checks.shape(op, name, cache_seqlens, (query.shape[0],), "one per sequence")
    _check_lengths(cache_seqlens, key_cache.shape[2])


def _fits(query: Any, key_cache: Any, value_cache: Any, cache_seqlens: Any) -> bool:
    """Return whether a call is an everyday one without mistakes: a quarter of the checks' time."""
    if not isinstance(query, torch.Tensor) or torch.is_grad_enabled():
        return False
    dtype, device = query.dtype, query.device
    alike = checks.alike
    if not (alike(query, dtype, device) and alike(key_cache, dtype, device)):
        return False
    if not (alike(value_cache, dtype, device) and alike(cache_seqlens, torch.int64, device)):
        return False
    queries, keys, values = query.shape, key_cache.shape, value_cache.shape
    if not dtype.is_floating_point or len(queries) != 4 or len(keys) != 4 or len(values) != 4:
        return False
    batch, heads, capacity, size = keys
    return bool(
        heads != 0
        and queries[0] == batch
        and queries[1] % heads == 0
        and queries[3] == size
        and values[0] == batch
        and values[1] == heads
        and values[2] == capacity
        and cache_seqlens.shape == (batch,)
    )


def _check_lengths(lengths: torch.Tensor, capacity: int) -> None:
    expected = f"from 0 to {capacity}, the cache's capacity"
    checks.indices("attention_decode", "cache_seqlens", lengths, capacity + 1, expected)


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, key_cache, value_cache, cache_seqlens, alibi_slopes, sinks, *numbers = args
    scale, window_left, softcap = numbers
    output, lse = _fake(query, value_cache)
    for n, length in enumerate(cache_seqlens.tolist()):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[n]
        pattern = AttentionOptions(scale, window_left, 0, softcap, length - query.shape[2])
        here = slice(n, n + 1)
        k, v = key_cache[here, :, :length], value_cache[here, :, :length]
        wide, lse[here], _ = formulas.forward(query[here], k, v, None, slopes, sinks, None, pattern)
        output[here] = wide.to(query.dtype)
    return output, lse


def _fake(query: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = query.shape
    return (
        formulas.new_heads_inside(query, batch, heads, rows, value_cache.shape[3]),
        query.new_empty(batch, heads, rows, dtype=dtypes.statistics_dtype(query.dtype)),
    )


def _shard(query: Any, key_cache: Any, alibi_slopes: Any) -> list[Sharding]:
    """Batch and heads may be sharded."""
    ranks = query.mesh.size()
    heads_divide = query.shape[1] % ranks == 0 and key_cache.shape[1] % ranks == 0
    rules: list[Sharding] = []
    words: list[Placement] = [REPLICATE, 0, *([1] if heads_divide else [])]
    for word in words:
        lengths = 0 if word == 0 else REPLICATE
        options = formulas.option_placements(word, alibi_slopes)
        rules.append(([word, word], [word, word, word, lengths, *options]))
    return rules


_OP = define_op(
    "attention_decode",
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens,"
    " Tensor? alibi_slopes, Tensor? sinks, float scale, SymInt window_left, float softcap)"
    " -> (Tensor output, Tensor lse)",
    contract={
        "query": "T [batch, heads, queries, size]",
        "key_cache": "T [batch, key_heads, capacity, size]",
        "value_cache": "T [batch, key_heads, capacity, value_size]",
        "cache_seqlens": "int64 [batch]",
        "alibi_slopes": "stat(T) [heads] | [batch, heads]",
        "sinks": "stat(T) [heads]",
        "output": "T [batch, heads, queries, value_size]",
        "lse": "stat(T) [batch, heads, queries]",
        "heads": "heads == 0 or key_heads > 0 and heads % key_heads == 0",
        "softcap": "0 <= softcap < inf",
    },
    reference=_reference,
    fake=_fake,
    triton="fusedops.kernels.attention_decode",
    shard=_shard,
)
