"""Attention over a sharded sequence by heads: each rank gets all tokens of some heads.

One all-to-all gives each rank queries, keys and values of all tokens for ``1 / n`` of the heads,
the kernels run as on one process, and one more all-to-all returns the outputs to the ranks of
their tokens. The backward does the same. A rank sends ``(n - 1) / n`` of its queries, keys, values
and outputs each time: less than a ring from a few ranks on, but nothing is computed meanwhile, and
there must be a head for each rank.

Shapes are those of ``ring.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, philox
from fusedops._core.library import define_exchange
from fusedops.parallel.comm import collectives
from fusedops.parallel.context._checks import Request, request
from fusedops.parallel.context.layout import SequenceLayout, order, order_back


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    seed: Tensor | None = None,
) -> Any:
    """Attend over a sequence that is sharded over a group; each rank computes some of the heads.

    The result is that of ``ring_attention``, by two all-to-alls instead of a ring.

    Args:
        query: ``[B, H, S / n, D]``, the tokens of this rank; ``n`` divides ``H``.
        key: ``[B, Hkv, S / n, D]``; ``n`` divides ``Hkv`` or ``Hkv`` divides ``n``: a head whose
            keys several ranks need is sent to each of them.
        value: ``[B, Hkv, S / n, Dv]``.
        group: of the ``n`` ranks.
        dropout_p: probability with which a weight is dropped.
        is_causal: as ``ring_attention``, and so are all that follow.
        balance: here the layout of the shards changes no cost.
        cu_seqlens: as there.
        scale: as there.
        enable_gqa: as there.
        window: as there.
        softcap: as there.
        alibi_slopes: ``[H]`` or ``[B, H]``, of all heads.
        sinks: ``[H]``, of all heads. Its gradient is that of this rank's heads and 0 for the
            others: a part of a sum over ranks.
        return_lse: as there.
        seed: as there.

    Returns:
        ``[B, H, S / n, Dv]`` of query's dtype, laid out in memory as ``[B, S / n, H, Dv]``; with
        ``return_lse`` also the log-sum-exp ``[B, H, S / n]`` in float32 (float64 for float64).

    Raises:
        ValueError: a shape, device or option does not fit, or the ranks do not divide the heads.
        TypeError: an argument is no tensor or process group, or its dtype does not fit.
        UnsupportedError: as ``ring_attention``.

    Note:
        Numerics are those of ``attention``; each row is computed on one rank as on one process. The
        same bits in every run. Dropout is that of ``ring_attention``.

    Reference:
        Jacobs et al.: DeepSpeed Ulysses, arXiv:2309.14509.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import ulysses_attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
        >>> ulysses_attention(q, k, v, dist.group.WORLD, is_causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
        >>> dist.destroy_process_group()
    """
    op = "ulysses_attention"
    a, layout = request(
        op,
        (query, key, value),
        shards=(group, balance, cu_seqlens),
        flags={"enable_gqa": enable_gqa, "is_causal": is_causal, "return_lse": return_lse},
        dropout=(dropout_p, seed),
        scores=(window, softcap, alibi_slopes, sinks, scale),
    )
    ranks, rank = group.size(), group.rank()
    heads, key_heads = a.query.shape[1], a.key.shape[1]
    if heads % ranks:
        checks.fail(op, "query", f"of a number of heads that {ranks} ranks divide", heads)
    key, value = a.key, a.value
    if key_heads % ranks:
        if ranks % key_heads:
            expected = f"of a number of heads that {ranks} ranks divide, or that divides {ranks}"
            checks.fail(op, "key", expected, key_heads)
        key, value = (x.repeat_interleave(ranks // key_heads, 1) for x in (key, value))
    if a.alibi_slopes is not None:
        a = a._replace(alibi_slopes=a.alibi_slopes.chunk(ranks, -1)[rank])
    if a.sinks is not None:
        a = a._replace(sinks=a.sinks.chunk(ranks)[rank])
    if a.seed is not None:
        a = a._replace(seed=_seed_of_heads(a.seed, layout, heads, rank * (heads // ranks)))
    query, key, value = _to_heads([a.query, key, value], layout, group)
    output, lse = _attend(a._replace(query=query, key=key, value=value), layout)
    output = _to_tokens(output, layout, group)
    if not return_lse:
        return output
    return output, _to_tokens(lse.unsqueeze(-1), layout, group).squeeze(-1)


def _seed_of_heads(seed: Tensor, layout: SequenceLayout, heads: int, first_head: int) -> Tensor:
    """Return the seed with the indices of the scores of the heads from ``first_head`` on."""
    seed = philox.placed_scores(seed, heads, layout.length)
    seed = torch.cat((seed[:2], seed[2:3] + first_head * seed[4:], seed[3:]))
    if layout.complete_rows:
        return seed
    tokens = torch.arange(layout.ends[-1], device=seed.device)
    return philox.at_tokens(seed, tokens, tokens, layout.length)


def _attend(a: Request, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Attend over complete sequences ``[B, H / n, S, D]``."""
    options = (a.alibi_slopes, a.sinks, a.seed)
    numbers = (a.dropout_p, a.scale, a.window_left, a.window_right, a.softcap, a.keep_remainder)
    inputs = (a.query, a.key, a.value)
    if layout.complete_rows:
        output, lse, *_ = torch.ops.fusedops.attention(*inputs, None, *options, *numbers)
        return output, lse
    batch, device = a.query.shape[0], a.query.device
    ends = torch.tensor(layout.ends, dtype=torch.int64)
    longest = int(ends.diff().max())
    packed = (x.transpose(1, 2).flatten(0, 1) for x in inputs)
    output, lse, _ = torch.ops.fusedops.attention_varlen(
        *packed, *[ends.to(device)] * 2, *options, longest, longest, *numbers
    )
    lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return output.unflatten(0, (batch, -1)).transpose(1, 2), lse


def _to_heads(
    tensors: list[Tensor], layout: SequenceLayout, group: dist.ProcessGroup
) -> list[Tensor]:
    """Return ``[B, H, S / n, D]`` as ``[B, H / n, S, D]``: all tokens of this rank's heads."""
    ranks = group.size()
    if ranks == 1:
        return tensors
    batch = tensors[0].shape[0]
    # [n, B * s, H / n * D]: a line for each rank and token, the tensors side by side.
    lines = [
        x.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2) for x in tensors
    ]
    received = _send(torch.cat(lines, -1).flatten(0, 1), layout, group, to_heads=True)
    parts = received.unflatten(0, (batch, layout.length)).split([x.shape[-1] for x in lines], -1)
    return [
        part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
        for part, x in zip(parts, tensors, strict=True)
    ]


def _to_tokens(tensor: Tensor, layout: SequenceLayout, group: dist.ProcessGroup) -> Tensor:
    """Return ``[B, H / n, S, D]`` as ``[B, H, S / n, D]``: all heads of this rank's tokens."""
    ranks = group.size()
    if ranks == 1:
        return tensor
    batch, heads, _, size = tensor.shape
    lines = tensor.transpose(1, 2).flatten(2).flatten(0, 1)
    received = _send(lines, layout, group, to_heads=False)
    by_rank = received.view(ranks, batch, layout.length // ranks, heads, size)
    return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _send(
    lines: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, *, to_heads: bool
) -> Tensor:
    names = layout.length, list(layout.ends), layout.balance, group.group_name
    return _EXCHANGE(lines, *names, to_heads)


@functools.lru_cache(maxsize=8)
def _places(layout: SequenceLayout, back: bool, device: torch.device) -> Tensor:
    """Return ``order`` or ``order_back``, cached for the other layers: only operators call it."""
    return (order_back if back else order)(layout, device)


def _exchange(
    lines: Tensor, length: int, ends: Sequence[int], balance: str, group: str, to_heads: bool
) -> Tensor:
    """Exchange lines of this rank's tokens and all heads for those of all tokens and its heads."""
    ranks = collectives.group_of(group)
    layout = SequenceLayout(length, ranks.size(), balance, tuple(ends))
    places = _places(layout, to_heads, lines.device)
    if to_heads:
        received = collectives.all_to_all(lines.contiguous(), ranks, label="to heads").wait()
        return received.index_select(0, places)
    lines = lines.index_select(0, places)
    return collectives.all_to_all(lines, ranks, label="to tokens").wait()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.names, ctx.to_heads = inputs[1:5], inputs[5]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _EXCHANGE(grad, *ctx.names, not ctx.to_heads), *[None] * 5


_EXCHANGE = define_exchange(
    "context_all_to_all",
    "(Tensor lines, SymInt length, SymInt[] ends, str balance, str group, bool to_heads)"
    " -> (Tensor received)",
    kernel=_exchange,
    fake=lambda lines, *_: torch.empty_like(lines, memory_format=torch.contiguous_format),
    setup_context=_save,
    backward=_gradient,
)
