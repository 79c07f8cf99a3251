"""Attention over packed sequences, which neither stores nor computes padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding, meta
from fusedops.kernels._arguments import VarlenArguments, of_backward
from fusedops.ops import _attention_math as formulas
from fusedops.ops._attention_math import AttentionOptions


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    seed: torch.Tensor | None = None,
) -> Any:
    """Attend within each of several packed sequences.

    Sequence ``n`` has the queries ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` and the keys
    ``cu_seqlens_k[n] .. cu_seqlens_k[n + 1]``. The last query is aligned with the last key (the
    lower right corner, as in flash-attention): with ``Sq`` queries and ``Sk`` keys, ``is_causal``
    lets query ``i`` attend ``j <= i + Sk - Sq``, and ``window`` counts from there. The output of a
    query without any allowed key is 0.

    Args:
        query: ``[tokens_q, H, D]``, any floating dtype, any strides.
        key: ``[tokens_k, Hkv, D]``, the dtype of ``query``; ``Hkv`` divides ``H``.
        value: ``[tokens_k, Hkv, Dv]``.
        cu_seqlens_q: ``[sequences + 1]`` int32 or int64: from 0, rising, to ``tokens_q``.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: at least the longest sequence of queries, in tokens, below ``2 ** 31``.
        max_seqlen_k: at least the longest sequence of keys, in tokens, below ``2 ** 31``.
        dropout_p: probability with which a weight is dropped.
        is_causal: forbid keys after the query's position.
        scale: factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``: numbers of keys on both sides of the query's position; -1 is
            unbounded.
        softcap: bound of the scores: ``softcap * tanh(score / softcap)``.
        alibi_slopes: ``[H]`` or ``[sequences, H]``: adds ``-slope * |distance|``.
        sinks: ``[H]``: a score that is added to each row's denominator, as of a key without a
            value.
        return_lse: also return the log-sum-exp of each row.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. ``[5 + tokens_q + tokens_k]`` for a shard of a larger tensor
            (``_core/philox.py``).

    Returns:
        ``[tokens_q, H, Dv]`` of query's dtype, contiguous; with ``return_lse`` also the log-sum-exp
        ``[H, tokens_q]`` in float32 (float64 for float64), differentiable too.

    Raises:
        ValueError: a shape, device or option does not fit; ``cu_seqlens`` are not monotone, do not
            end at the number of tokens, or exceed ``max_seqlen`` (on a GPU, where reading the
            values would block the host, a device-side assertion fails).
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Numerics, saved tensors, determinism and non-finite values are those of ``attention``; no
        value of one sequence reaches another. Dropout draws by a counter at ``(h * tokens_q + t) *
        max_seqlen_k + j``. Under autocast query, key and value are cast.

    Reference:
        Dao: FlashAttention-2, arXiv:2307.08691.

    Example:
        >>> import torch, fusedops
        >>> ends = torch.tensor([0, 1, 3])
        >>> x = torch.ones(3, 1, 2)
        >>> v = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
        >>> fusedops.attention_varlen(x, x, v, ends, ends, 2, 2).flatten()
        tensor([1., 3., 3.])
    """
    op = "attention_varlen"
    checks.flag(op, "is_causal", is_causal)
    checks.flag(op, "return_lse", return_lse)
    _check(query, key, value, cu_seqlens_q, cu_seqlens_k)
    formulas.check_sequences(op, "cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    formulas.check_sequences(op, "cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k)
    checks.probability(op, "dropout_p", dropout_p)
    heads, sequences = query.shape[1], cu_seqlens_q.shape[0] - 1
    left, right, cap, factor = formulas.check_options(
        op, query, heads, sequences, window, softcap, alibi_slopes, sinks, scale
    )
    if is_causal:
        right = 0
    query, key, value = formulas.autocast(query, key, value)
    if seed is not None:
        tokens = query.shape[0] + key.shape[0]
        philox.check_seed(op, seed, query.device, scores=(3 + tokens,))
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = philox.new_seed(query.device)
    wide = dtypes.statistics_dtype(query.dtype)
    ends = (cu_seqlens_q.to(torch.int64), cu_seqlens_k.to(torch.int64))
    slopes = alibi_slopes.to(wide) if alibi_slopes is not None else None
    sink_logits = sinks.to(wide) if sinks is not None else None
    keep = formulas.records_graph_or_traces(query, key, value, sinks)
    numbers = (max_seqlen_q, max_seqlen_k, float(dropout_p), factor, left, right, cap, keep)
    output, lse, _ = _OP(query, key, value, *ends, slopes, sink_logits, seed, *numbers)
    return (output, lse) if return_lse else output


def _check(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    op = "attention_varlen"
    formulas.check_query(op, query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            checks.fail(op, name, "of 3 dims, [tokens, heads, head size]", list(tensor.shape))
    if key.shape[2] != query.shape[2]:
        checks.fail(op, "key", f"of head size {query.shape[2]}, query's", key.shape[2])
    formulas.check_tokens(op, "value", value, "key", key)
    formulas.check_heads(op, ("query", "key"), query.shape[1], key.shape[1])
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor(op, name, tensor, floating=False)
        if tensor.device != query.device:
            checks.fail(op, name, f"on {query.device}, the device of query", tensor.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"of the shape of cu_seqlens_q, {list(cu_seqlens_q.shape)}"
        checks.fail(op, "cu_seqlens_k", expected, list(cu_seqlens_k.shape))


def _sequences(call: VarlenArguments) -> Iterator[tuple[slice, tuple[Any, ...]]]:
    """Yield per sequence: its queries, and the arguments of ``formulas.forward``."""
    tokens, heads, _ = call.query.shape
    shape = (heads, tokens, call.max_seqlen_k)
    placed = call.seed is not None and call.seed.numel() > 2
    dropout = (call.seed, call.dropout_p, call.query)
    keep = None if placed else formulas.keep_factors(shape, *dropout)
    starts_q, starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for n in range(len(starts_q) - 1):
        rows = slice(starts_q[n], starts_q[n + 1])
        columns = slice(starts_k[n], starts_k[n + 1])
        q = call.query[rows].transpose(0, 1).unsqueeze(0)
        k, v = (t[columns].transpose(0, 1).unsqueeze(0) for t in (call.key, call.value))
        slopes = call.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[n]
        factors = keep[None, :, rows, : k.shape[2]] if keep is not None else None
        if placed:
            # Its tokens have places of their own.
            assert call.seed is not None
            places = call.seed[5 : 5 + tokens][rows], call.seed[5 + tokens :][columns]
            factors = formulas.keep_factors((1, heads, *map(len, places)), *dropout, places)
        window = (call.window_left, call.window_right)
        pattern = AttentionOptions(call.scale, *window, call.softcap, k.shape[2] - q.shape[2])
        yield rows, (q, k, v, None, slopes, call.sinks, factors, pattern)


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = VarlenArguments(*args)
    query, wide = call.query, dtypes.statistics_dtype(call.query.dtype)
    heads = query.shape[1]
    outputs = [query.new_empty(0, heads, call.value.shape[2], dtype=wide)]
    lses = [query.new_empty(heads, 0, dtype=wide)]
    for _, arguments in _sequences(call):
        output, lse, _ = formulas.forward(*arguments)
        outputs.append(output[0].transpose(0, 1))
        lses.append(lse[0])
    output, remainder = formulas.rounded(torch.cat(outputs), query.dtype, call.keep_remainder)
    return output, torch.cat(lses, dim=1), remainder


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = VarlenArguments(*args)
    query = call.query
    tokens, heads, _ = query.shape
    shape = (tokens, heads, call.value.shape[2])
    kept = formulas.keeps(query.dtype, call.keep_remainder)
    return (
        query.new_empty(shape),
        query.new_empty(heads, tokens, dtype=dtypes.statistics_dtype(query.dtype)),
        query.new_empty(shape if kept else 0),
    )


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    # The saved outputs are not used: this is also the second derivative.
    grads, call, _, output_mask = of_backward(VarlenArguments, args, incoming=2)
    grad_output, grad_lse = grads
    parts: list[list[torch.Tensor]] = [[tensor[:0]] for tensor in call[:3]]
    sinks = call.sinks
    grad_sinks = torch.zeros_like(sinks) if sinks is not None and output_mask[3] else None
    mask = [*output_mask[:3], False, output_mask[3]]
    for rows, arguments in _sequences(call):
        incoming = (
            grad_output[rows].transpose(0, 1).unsqueeze(0) if grad_output is not None else None,
            grad_lse[None, :, rows] if grad_lse is not None else None,
        )
        gradients = formulas.backward(*incoming, *arguments, mask)
        for part, grad in zip(parts, gradients, strict=False):
            if grad is not None:
                part.append(grad[0].transpose(0, 1))
        if grad_sinks is not None:
            assert gradients[4] is not None
            grad_sinks = grad_sinks + gradients[4]
    pairs = zip(parts, output_mask, strict=False)
    return (*(torch.cat(part) if needed else None for part, needed in pairs), grad_sinks)


def _shard(
    query: Any, key: Any, alibi_slopes: Any, seed: Any, keep_remainder: bool
) -> list[Sharding]:
    """Heads (dim 1) may be sharded, unless dropout counts from the tensor's beginning."""
    ranks = query.mesh.size()
    replicated = seed is not None or query.shape[1] % ranks or key.shape[1] % ranks
    words: list[Placement] = [REPLICATE] if replicated else [REPLICATE, 1]
    has_remainder = formulas.keeps(meta(query).dtype, keep_remainder)
    rules: list[Sharding] = []
    for word in words:
        lse = 0 if word == 1 else REPLICATE
        remainder = word if has_remainder else REPLICATE
        options = formulas.option_placements(word, alibi_slopes)
        inputs = [word, word, word, REPLICATE, REPLICATE, *options, REPLICATE]
        rules.append(([word, lse, remainder], inputs))
    return rules


_OP = define_op(
    "attention_varlen",
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " float dropout_p, float scale, SymInt window_left, SymInt window_right, float softcap,"
    " bool keep_remainder) -> (Tensor output, Tensor lse, Tensor remainder)",
    contract={
        "query": "T [tokens, heads, size]",
        "key": "T [key_tokens, key_heads, size]",
        "value": "T [key_tokens, key_heads, value_size]",
        "cu_seqlens_q, cu_seqlens_k": "int64 [ends]",
        "alibi_slopes": "stat(T) [heads] | [ends - 1, heads]",
        "sinks": "stat(T) [heads]",
        "seed": "int64 [2] | [5 + tokens + key_tokens]",
        "output": "T [tokens, heads, value_size]",
        "lse": "stat(T) [heads, tokens]",
        "remainder": "T [tokens, heads, value_size] | [0]",
        "ends": "ends >= 1",
        "heads": "heads == 0 or key_heads > 0 and heads % key_heads == 0",
        "max_seqlen_q": "0 <= max_seqlen_q <= 2147483647",
        "max_seqlen_k": "0 <= max_seqlen_k <= 2147483647",
        "dropout_p": "0 <= dropout_p <= 1",
        "softcap": "0 <= softcap < inf",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("query", "key", "value", "sinks"),
        outputs=("output", "lse"),
        saves=(*VarlenArguments._fields[:8], "output", "lse", "remainder"),
        reference=_backward,
    ),
    triton="fusedops.kernels.attention_varlen",
    shard=_shard,
)
