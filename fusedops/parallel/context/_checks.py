"""The checked arguments of attention over shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, dtypes, philox
from fusedops.ops import _attention_math as math
from fusedops.parallel.comm.seeds import agreed_seed
from fusedops.parallel.context.layout import SequenceLayout, layout_of


class Request(NamedTuple):
    """A call of attention over shards: the arguments of ``ring_attention``'s op, in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    ends: Sequence[int]  # of the documents, as ``SequenceLayout`` has them
    balance: str
    dropout_p: float
    scale: float
    window_left: int
    window_right: int
    softcap: float
    keep_remainder: bool
    group: str


def request(
    op: str,
    tensors: tuple[Any, Any, Any],
    *,
    shards: tuple[Any, Any, Any],
    flags: Mapping[str, Any],
    dropout: tuple[Any, Any],
    scores: tuple[Any, Any, Any, Any, Any],
) -> tuple[Request, SequenceLayout]:
    """Return the request and its layout; raise unless the arguments are shards of one sequence.

    Args:
        op: the name of the public function, for messages.
        tensors: query, key and value.
        shards: group, balance and cu_seqlens.
        flags: ``enable_gqa``, ``is_causal`` and ``return_lse``.
        dropout: dropout_p and seed.
        scores: window, softcap, alibi_slopes, sinks and scale.
    """
    query, key, value = tensors
    group, balance, cu_seqlens = shards
    dropout_p, seed = dropout
    _, _, alibi_slopes, sinks, _ = scores
    check_group(op, group)
    for name, flag in flags.items():
        checks.flag(op, name, flag)
    _check_tensors(op, query, key, value, flags["enable_gqa"])
    checks.probability(op, "dropout_p", dropout_p)
    rows, heads = query.shape[:2]
    ends, length = ends_of(op, cu_seqlens), query.shape[2] * group.size()
    layout = layout_of(op, length, group.size(), balance, ends, rows)
    left, right, cap, factor = math.check_options(op, query, heads, rows, *scores)
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
        seed = agreed_seed(query.device, group)
    wide = dtypes.statistics_dtype(query.dtype)
    a = Request(
        query,
        key,
        value,
        alibi_slopes.to(wide) if alibi_slopes is not None else None,
        sinks.to(wide) if sinks is not None else None,
        seed,
        list(layout.ends),
        layout.balance,
        float(dropout_p),
        factor,
        left,
        0 if flags["is_causal"] else right,
        cap,
        math.records_graph_or_traces(query, key, value, sinks),
        group.group_name,
    )
    return a, layout


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
