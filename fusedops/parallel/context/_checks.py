"""The checked arguments of attention over shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, dtypes, philox
from fusedops.ops import _attention_math as math
from fusedops.parallel.context.layout import SequenceLayout, layout_of


class Request(NamedTuple):
    """A call of attention over shards, its arguments in the types of the operators."""

    query: Tensor
    key: Tensor
    value: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    layout: SequenceLayout
    dropout_p: float
    scale: float
    window_left: int
    window_right: int
    softcap: float
    keep_remainder: bool


def request(
    op: str,
    query: Any,
    key: Any,
    value: Any,
    group: Any,
    *,
    is_causal: Any,
    dropout_p: Any,
    balance: Any,
    cu_seqlens: Any,
    scale: Any,
    enable_gqa: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    return_lse: Any,
    seed: Any,
) -> Request:
    """Return the request; raise unless the arguments fit and are shards of one sequence."""
    check_group(op, group)
    flags = {"enable_gqa": enable_gqa, "is_causal": is_causal, "return_lse": return_lse}
    for name, flag in flags.items():
        checks.flag(op, name, flag)
    _check_tensors(op, query, key, value, enable_gqa)
    checks.probability(op, "dropout_p", dropout_p)
    rows, heads = query.shape[:2]
    ends, length = ends_of(op, cu_seqlens), query.shape[2] * group.size()
    layout = layout_of(op, length, group.size(), balance, ends, rows)
    left, right, cap, factor = math.check_options(
        op, query, heads, rows, window, softcap, alibi_slopes, sinks, scale
    )
    if alibi_slopes is not None and alibi_slopes.dim() == 2 and not layout.complete_rows:
        raise checks.UnsupportedError(
            f"{op}: alibi_slopes must be [{heads}] with cu_seqlens, got a line per row"
        )
    query, key, value = math.autocast(query, key, value)
    if seed is not None:
        philox.check_seed(op, seed, query.device, scores=(3,))
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        seed = philox.new_seed(query.device)
    wide = dtypes.statistics_dtype(query.dtype)
    return Request(
        query,
        key,
        value,
        alibi_slopes.to(wide) if alibi_slopes is not None else None,
        sinks.to(wide) if sinks is not None else None,
        seed,
        layout,
        float(dropout_p),
        factor,
        left,
        0 if is_causal else right,
        cap,
        math.wants_gradient(query, key, value, sinks),
    )


def _check_tensors(op: str, query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    checks.tensor(op, "query", query)
    same = dtypes.autocast_dtype(query.device) is None
    for name, tensor in (("key", key), ("value", value)):
        checks.like(op, name, tensor, "query", query, dtype=same)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            expected = "of 4 dims, [batch, heads, tokens of this rank, head size]"
            checks.fail(op, name, expected, list(tensor.shape))
    batch, heads, tokens, size = query.shape
    shape = (batch, key.shape[1], tokens, size)
    checks.shape(op, "key", key, shape, "batch, tokens and head size of query")
    math.check_tokens(op, "value", value, "key", key)
    if heads != key.shape[1]:
        if not enable_gqa:
            expected = f"of query's number of heads, {heads}, unless enable_gqa=True"
            checks.fail(op, "key", expected, key.shape[1])
        math.check_heads(op, ("query", "key"), heads, key.shape[1])


def check_group(op: str, group: Any) -> None:
    """Raise unless ``group`` is a process group that this process belongs to."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group must be a torch.distributed.ProcessGroup that this process belongs to, "
            f"got {checks.shown(group)}"
        )


def ends_of(op: str, cu_seqlens: Any) -> list[int] | None:
    """Return where documents end as numbers. A tensor on a GPU makes the host wait."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, Tensor):
        integers = (torch.int32, torch.int64)
        checks.index_tensor(op, "cu_seqlens", cu_seqlens, dtypes=integers)
        if cu_seqlens.dim() != 1:
            checks.fail(op, "cu_seqlens", "of 1 dim, [documents + 1]", list(cu_seqlens.shape))
        return list(cu_seqlens.tolist())
    return list(checks.sizes(op, "cu_seqlens", cu_seqlens))
