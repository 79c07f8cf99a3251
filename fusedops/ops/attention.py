"""Scaled dot-product attention with every option that transformers use, saving O(S).

The scores are never materialised: kernels keep a running maximum and sum per row (online softmax),
and save the row's log-sum-exp for the backward. The formulae are in ``_attention_math.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox
from fusedops._core.layouts import heads_inside
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding, meta
from fusedops.kernels._arguments import AttentionArguments, of_backward
from fusedops.ops import _attention_math as formulas
from fusedops.ops._attention_math import AttentionOptions


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    seed: torch.Tensor | None = None,
) -> Any:
    """Attend: ``softmax(query @ key.T * scale + mask) @ value`` for each head.

    The arguments of ``torch.nn.functional.scaled_dot_product_attention``, and more. Query ``i`` may
    attend key ``j`` if the mask, ``is_causal`` (``j <= i``: aligned to the upper left, as torch's)
    and ``window`` (``-left <= j - i <= right``) all allow it. The output of a query without any
    allowed key is 0, and so are its gradients. ``attention_varlen`` and ``attention_decode`` align
    to the lower right instead.

    Args:
        query: ``[..., H, Sq, D]`` (or ``[Sq, D]``), any floating dtype, any strides.
        key: ``[..., Hkv, Sk, D]``, the dtype of ``query``.
        value: ``[..., Hkv, Sk, Dv]``; ``Dv`` may differ from ``D``. The leading dims of the three
            broadcast.
        attn_mask: broadcastable to ``[..., H, Sq, Sk]``. Boolean: ``True`` may be attended.
            Floating: added to the scaled scores, and differentiable. Only minus infinity forbids: a
            row that a model's mask fills with the least finite number gives the mean of all values,
            as in torch.
        dropout_p: probability with which a weight is dropped (also in evaluation: pass 0.0 there,
            as with torch).
        is_causal: forbid ``j > i``. May be combined with a mask.
        scale: factor of the scores, ``D ** -0.5`` by default.
        enable_gqa: let ``Hkv`` be a divisor of ``H``: query head ``h`` reads key head
            ``h // (H // Hkv)``.
        window: ``(left, right)``: numbers of keys on both sides of the query's own position; -1 is
            unbounded.
        softcap: bound of the scores: ``softcap * tanh(score / softcap)``, before mask and slopes.
        alibi_slopes: ``[H]`` or ``[B, H]``: adds ``-slope * |j - i|``. Not differentiable.
        sinks: ``[H]``: a score that is added to each row's denominator, as of a key without a
            value.
        return_lse: also return the log-sum-exp of each row.
        seed: int64 ``[2]``, the seed of the dropout mask; by default two numbers from torch's
            generator. ``[5]`` or ``[5 + Sq + Sk]`` for a shard of a larger tensor
            (``_core/philox.py``).

    Returns:
        ``[..., H, Sq, Dv]`` of query's dtype, laid out in memory as ``[..., Sq, H, Dv]`` like
        torch's; with ``return_lse`` also the log-sum-exp ``[..., H, Sq]`` in float32 (float64 for
        float64; minus infinity where nothing was attended, sinks included), differentiable too:
        ``merge_attention`` joins two halves of the keys with it.

    Raises:
        ValueError: a shape, device or option does not fit.
        TypeError: an argument is no tensor, or its dtype does not fit.
        UnsupportedError: ``alibi_slopes`` requires a gradient.

    Note:
        Scores, softmax and sums are float32 (float64 for float64); the probabilities enter the
        second product in query's dtype. Saves the inputs, the output, one number per row and, in
        half precision, the rounding error of the output: without it the gradients' error would be
        several times that of eager attention. In float32 and float64, and with an additive mask, a
        row's maximum and sum are saved separately as well: gradients are right however large the
        scores are, and whatever the mask adds to a complete row. In other cases all weights of a
        row that the backward recomputes have a relative error of about 1e-7 times the row's largest
        score, which is visible in half precision from 1e4 on. For the gradient of an additive mask
        the backward allocates the gradient of all scores, O(Sq Sk). Deterministic: the same bits
        for any number of threads; a single query uses the kernel of decoding. Dropout draws by a
        counter at ``((b * H + h) * Sq + i) * Sk + j``. NaN and infinities give the result of the
        formula; the log-sum-exp is NaN if a score is inf. NaN in a key or value that a query may
        not attend may or may not reach the query (as 0 times NaN), because blocks of such keys are
        skipped, as in torch's kernels. A dropped weight is 0 even if it was NaN. Under autocast
        query, key and value are cast, as torch does; mask, slopes and sinks keep their dtype.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762; Dao: FlashAttention-2,
        arXiv:2307.08691; Press et al.: ALiBi, arXiv:2108.12409; Xiao et al.: attention sinks,
        arXiv:2309.17453; Gemma 2 (soft-cap), arXiv:2408.00118.

    Example:
        >>> import torch, fusedops
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
        >>> fusedops.attention(q, k, v, is_causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])

        A padding mask ``[B, S]``, ``True`` for tokens, becomes ``[B, 1, 1, S]``:

        >>> q, k, v = torch.randn(3, 2, 4, 5, 8)  # B = 2, H = 4, S = 5, D = 8
        >>> mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None]
        >>> sdpa = torch.nn.functional.scaled_dot_product_attention
        >>> torch.testing.assert_close(fusedops.attention(q, k, v, mask), sdpa(q, k, v, mask))
        >>> causal = torch.ones(5, 5, dtype=torch.bool).tril() & mask  # torch's needs one mask
        >>> y = fusedops.attention(q, k, v, mask, is_causal=True)
        >>> torch.testing.assert_close(y, sdpa(q, k, v, causal))
    """
    if not type(is_causal) is type(enable_gqa) is type(return_lse) is bool:
        checks.flag("attention", "is_causal", is_causal)
        checks.flag("attention", "enable_gqa", enable_gqa)
        checks.flag("attention", "return_lse", return_lse)
    matrices = isinstance(query, torch.Tensor) and query.dim() == 2
    q, k, v = query, key, value = _check(query, key, value, enable_gqa)
    leading = query.shape[:-3]
    if len(leading) != 1:
        q, k, v = (_four_dims(tensor) for tensor in (query, key, value))
    batch, heads = q.shape[:2]
    mask = None
    if attn_mask is not None:
        shape = (*leading, heads, q.shape[2], k.shape[2])
        mask = _mask(attn_mask, query, shape, batch)
    checks.probability("attention", "dropout_p", dropout_p)
    left, right, cap, factor = formulas.check_options(
        "attention", query, heads, batch, window, softcap, alibi_slopes, sinks, scale
    )
    if is_causal:
        right = 0
    q, k, v = formulas.autocast(q, k, v)
    if seed is not None:
        philox.check_seed("attention", seed, q.device, scores=(3, 3 + q.shape[2] + k.shape[2]))
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = philox.new_seed(q.device)
    wide = dtypes.statistics_dtype(q.dtype)
    slopes = alibi_slopes.to(wide) if alibi_slopes is not None else None
    sink_logits = sinks.to(wide) if sinks is not None else None
    keep = formulas.records_graph_or_traces(q, k, v, mask, sink_logits)
    numbers = (float(dropout_p), factor, left, right, cap, keep)
    try:
        output, lse, *_ = _OP(q, k, v, mask, slopes, sink_logits, seed, *numbers)
    except NotImplementedError:  # of the dispatcher: not dense, for which _fits does not look
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            checks.tensor("attention", name, tensor)
        raise
    if query.dim() != 4:
        drop = 2 if matrices else 1
        output = output.reshape(*leading, *output.shape[drop:])
        lse = lse.reshape(*leading, *lse.shape[drop:])
    return (output, lse) if return_lse else output


def merge_attention(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys into attention over both.

    ``lse' = log(exp(lse) + exp(other_lse))``; each output is weighted by ``exp(lse - lse')``.

    Args:
        output: ``[..., S, Dv]``, over the first set of keys.
        lse: ``[..., S]``, its log-sum-exp.
        other: the shape of ``output``, over the second set.
        other_lse: its log-sum-exp. A sink may be part of one of the two, not of both.

    Returns:
        Output and log-sum-exp over the union, dtypes as given. Rows that attended nothing in both
        are 0 with log-sum-exp minus infinity. Differentiable torch operations.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is no floating tensor.

    Example:
        >>> import torch, fusedops
        >>> q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 4, 2)
        >>> halves = [fusedops.attention(q, half, half, return_lse=True) for half in k.split(2, 2)]
        >>> fusedops.merge_attention(*halves[0], *halves[1])[0]
        tensor([[[[1., 1.]]]])
    """
    op = "merge_attention"
    given = (("output", output), ("lse", lse), ("other", other), ("other_lse", other_lse))
    for name, value in given:
        checks.like(op, name, value, "output", output)
    checks.shape(op, "lse", lse, output.shape[:-1], "one per row of output")
    checks.shape(op, "other", other, output.shape, "that of the first part")
    checks.shape(op, "other_lse", other_lse, lse.shape, "that of the first part")
    top = torch.maximum(lse, other_lse).detach()
    top = torch.where(top == -torch.inf, 0.0, top)
    first, second = torch.exp(lse - top), torch.exp(other_lse - top)
    total = first + second
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    weights = (first / total).unsqueeze(-1), (second / total).unsqueeze(-1)
    merged = (output * weights[0] + other * weights[1]).to(output.dtype)
    return merged, torch.where(empty, -torch.inf, top + torch.log(total))


def _check(
    query: Any, key: Any, value: Any, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if _fits(query, key, value):
        return query, key, value
    op = "attention"
    formulas.check_query(op, query, key=key, value=value)
    given = (("query", query), ("key", key), ("value", value))
    for name, tensor in given:
        if tensor.dim() < 2:
            expected = "of at least 2 dims, [..., heads, tokens, head size]"
            checks.fail(op, name, expected, list(tensor.shape))
    query, key, value = (tensor[(None,) * max(0, 3 - tensor.dim())] for _, tensor in given)
    if key.shape[-1] != query.shape[-1]:
        checks.fail(op, "key", f"of head size {query.shape[-1]}, query's", key.shape[-1])
    leading = [tensor.shape[:-3] for tensor in (query, key, value)]
    if any(sizes != leading[0] for sizes in leading):
        try:
            shared = torch.broadcast_shapes(*leading)
        except RuntimeError:
            shape = f"with leading dims that broadcast with query's, {list(leading[0])}"
            checks.fail(op, "key and value", shape, [list(sizes) for sizes in leading[1:]])
        query, key, value = (
            tensor.expand(*shared, *tensor.shape[-3:]) for tensor in (query, key, value)
        )
    formulas.check_tokens(op, "value", value, "key", key)
    heads, key_heads = query.shape[-3], key.shape[-3]
    if heads != key_heads:
        if not enable_gqa:
            expected = f"of query's number of heads, {heads}, unless enable_gqa=True"
            checks.fail(op, "key", expected, key_heads)
        formulas.check_heads(op, ("query", "key"), heads, key_heads)
    return query, key, value


def _fits(query: Any, key: Any, value: Any) -> bool:
    """Return whether all is well, in the everyday case: generation calls it for each token."""
    tensor = torch.Tensor
    if not (isinstance(query, tensor) and isinstance(key, tensor) and isinstance(value, tensor)):
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in checks.FLOATING:
        return False
    try:
        shape, keys, values = query.shape, key.shape, value.shape
    except RuntimeError:  # a nested tensor has none
        return False
    same_device = query.device == key.device == value.device
    return same_device and shape[:2] == keys[:2] and shape[3] == keys[3] and keys[:3] == values[:3]


def _four_dims(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 3:
        return tensor.unsqueeze(0)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def _mask(mask: Any, query: torch.Tensor, sizes: Sequence[int], batch: int) -> torch.Tensor:
    """Return the mask in four dims; broadcast dims stay of size 1 where possible."""
    op = "attention"
    checks.tensor(op, "attn_mask", mask, floating=False)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"{op}: attn_mask must be boolean or floating, got {mask.dtype}")
    if mask.device != query.device:
        checks.fail(op, "attn_mask", f"on {query.device}, the device of query", mask.device)
    fits = mask.dim() <= len(sizes) and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(sizes), strict=False)
    )
    if not fits:
        shape = "[" + ", ".join(map(str, sizes)) + "]"
        checks.fail(op, "attn_mask", f"broadcastable to {shape}", list(mask.shape))
    if mask.dtype != torch.bool and mask.dtype != query.dtype:
        mask = mask.to(dtypes.statistics_dtype(query.dtype))
    if len(sizes) > 4 and mask.dim() > 3:
        has_batch = any(size != 1 for size in mask.shape[:-3])
        leading, flat = (sizes[:-3], batch) if has_batch else (mask.shape[:-3], 1)
        mask = mask.expand(*leading, *mask.shape[-3:]).reshape(flat, *mask.shape[-3:])
    return mask[(None,) * (4 - mask.dim())]


def _dense(call: AttentionArguments) -> tuple[Any, ...]:
    """Return the arguments of ``formulas.forward``."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    keep = formulas.keep_factors(shape, call.seed, call.dropout_p, call.query)
    pattern = AttentionOptions(call.scale, call.window_left, call.window_right, call.softcap)
    return (*call[:6], keep, pattern)


def _reference(*args: Any) -> tuple[torch.Tensor, ...]:
    call = AttentionArguments(*args)
    wide, lse, parts = formulas.forward(*_dense(call))
    output, remainder = formulas.rounded(wide, call.query.dtype, call.keep_remainder)
    if remainder.dim() == 4:
        remainder = heads_inside(remainder)
    if not formulas.keeps_parts(call.query.dtype, call.attn_mask, call.keep_remainder):
        parts = lse.new_empty(0)
    return heads_inside(output), lse, remainder, parts


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    call = AttentionArguments(*args)
    query = call.query
    batch, heads, rows, _ = query.shape
    shape = (batch, heads, rows, call.value.shape[3])
    kept = formulas.keeps(query.dtype, call.keep_remainder)
    lse = query.new_empty(batch, heads, rows, dtype=dtypes.statistics_dtype(query.dtype))
    parts = formulas.keeps_parts(call.query.dtype, call.attn_mask, call.keep_remainder)
    return (
        formulas.new_heads_inside(query, *shape),
        lse,
        formulas.new_heads_inside(query, *shape) if kept else query.new_empty(0),
        lse.new_empty((*lse.shape, 2) if parts else (0,)),
    )


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    # The saved outputs are not used: this is also the second derivative.
    grads, call, _, output_mask = of_backward(AttentionArguments, args, incoming=2)
    return formulas.backward(*grads, *_dense(call), output_mask)


def _shard(
    query: Any,
    key: Any,
    attn_mask: Any,
    alibi_slopes: Any,
    seed: Any,
    window_left: int,
    window_right: int,
    keep_remainder: bool,
) -> list[Sharding]:
    """Batch (0) and heads (1) may be sharded, unless dropout counts from the tensor's beginning.

    So may the queries (2) of keys that every rank has, where nothing depends on a query's place.
    """
    words: list[Placement] = [REPLICATE]
    if seed is None:
        ranks = query.mesh.size()
        heads_divide = query.shape[1] % ranks == 0 and key.shape[1] % ranks == 0
        placeless = window_left < 0 and window_right < 0 and alibi_slopes is None
        words += [0, *([1] if heads_divide else []), *([2] if placeless else [])]
    dtype = meta(query).dtype
    has_remainder = formulas.keeps(dtype, keep_remainder)
    has_parts = formulas.keeps_parts(dtype, meta(attn_mask), keep_remainder)
    rules: list[Sharding] = []
    for word in words:
        keys = REPLICATE if word == 2 else word
        mask: Placement = REPLICATE
        if isinstance(word, int) and attn_mask is not None and attn_mask.shape[word] != 1:
            mask = word
        remainder = word if has_remainder else REPLICATE
        parts = word if has_parts else REPLICATE
        options = formulas.option_placements(word, alibi_slopes)
        inputs = [word, keys, keys, mask, *options, REPLICATE]
        rules.append(([word, word, remainder, parts], inputs))
    return rules


_OP = define_op(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes,"
    " Tensor? sinks, Tensor? seed, float dropout_p, float scale, SymInt window_left,"
    " SymInt window_right, float softcap, bool keep_remainder)"
    " -> (Tensor output, Tensor lse, Tensor remainder, Tensor lse_parts)",
    contract={
        "query": "T [batch, heads, queries, size]",
        "key": "T [batch, key_heads, keys, size]",
        "value": "T [batch, key_heads, keys, value_size]",
        "attn_mask": "bool | T | stat(T) [~batch, ~heads, ~queries, ~keys]",
        "alibi_slopes": "stat(T) [heads] | [batch, heads]",
        "sinks": "stat(T) [heads]",
        "seed": "int64 [2] | [5] | [5 + queries + keys]",
        "output": "T [batch, heads, queries, value_size]",
        "lse": "stat(T) [batch, heads, queries]",
        "remainder": "T [batch, heads, queries, value_size] | [0]",
        "lse_parts": "stat(T) [batch, heads, queries, 2] | [0]",
        "heads": "heads == 0 or key_heads > 0 and heads % key_heads == 0",
        "dropout_p": "0 <= dropout_p <= 1",
        "softcap": "0 <= softcap < inf",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("query", "key", "value", "attn_mask", "sinks"),
        outputs=("output", "lse"),
        saves=(*AttentionArguments._fields[:7], "output", "lse", "remainder", "lse_parts"),
        reference=_backward,
        layouts=dict.fromkeys(("query", "key", "value"), formulas.empty_heads_inside),
    ),
    triton="fusedops.kernels.attention",
    shard=_shard,
)
