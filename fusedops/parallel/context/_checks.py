"""What attention over shards demands of its arguments, in every function alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, dtypes
from fusedops.ops import _attention_math as math
from fusedops.parallel.context.layout import Layout, layout_of


def check_shards(
    op: str,
    query: Any,
    key: Any,
    value: Any,
    group: Any,
    enable_gqa: Any,
    is_causal: Any,
    return_lse: Any,
) -> None:
    """Raise unless the tensors are shards ``[B, H, S / n, D]`` of one length, of one group."""
    check_group(op, group)
    flags = {"enable_gqa": enable_gqa, "is_causal": is_causal, "return_lse": return_lse}
    for name, flag in flags.items():
        checks.flag(op, name, flag)
    checks.tensor(op, "query", query)
    same = dtypes.autocast_dtype(query.device) is None
    for name, tensor in (("key", key), ("value", value)):
        checks.like(op, name, tensor, "query", query, dtype=same)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            wanted = "of 4 dims, [batch, heads, tokens of this rank, head size]"
            checks.fail(op, name, wanted, list(tensor.shape))
    batch, heads, tokens, size = query.shape
    shape = (batch, key.shape[1], tokens, size)
    checks.shape(op, "key", key, shape, "batch, tokens and head size of query")
    math.check_tokens(op, "value", value, "key", key)
    if heads != key.shape[1]:
        if not enable_gqa:
            wanted = f"of query's number of heads, {heads}, unless enable_gqa=True"
            checks.fail(op, "key", wanted, key.shape[1])
        math.check_heads(op, ("query", "key"), heads, key.shape[1])


def check_group(op: str, group: Any) -> None:
    """Raise unless ``group`` is a process group that this process belongs to."""
    if group is None:
        raise TypeError(f"{op}: group must be a torch.distributed.ProcessGroup, got None")
    checks.group(op, "group", group)


def layout_for(
    op: str, query: Tensor, group: dist.ProcessGroup, balance: Any, cu_seqlens: Any
) -> Layout:
    """Return the layout of which these are the shards."""
    rows, length = query.shape[0], query.shape[2] * group.size()
    return layout_of(op, length, group.size(), balance, ends_of(op, cu_seqlens), rows)


def ends_of(op: str, cu_seqlens: Any) -> list[int] | None:
    """Return where documents end as numbers. A table on a GPU makes the host wait."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, Tensor):
        whole = (torch.int32, torch.int64)
        checks.index_tensor(op, "cu_seqlens", cu_seqlens, dtypes=whole)
        if cu_seqlens.dim() != 1:
            checks.fail(op, "cu_seqlens", "of 1 dim, [documents + 1]", list(cu_seqlens.shape))
        return list(cu_seqlens.tolist())
    return list(checks.sizes(op, "cu_seqlens", cu_seqlens))
