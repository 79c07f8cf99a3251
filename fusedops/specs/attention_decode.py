"""What tests, benchmarks and documentation need to know of ``attention_decode``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops._core.checks import UnsupportedError
from fusedops.ops.attention_decode import attention_decode
from fusedops.specs._attention_eager import NOT_FINITE, Attend, attend
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    alibi_slopes: torch.Tensor | None = None,
    attend: Attend = attend,
    **options: Any,
) -> Any:
    """Attend over the whole cache with a mask of what is filled, as static caches are used."""
    one = query.dim() == 3
    query = query.unsqueeze(2) if one else query
    rows, capacity = query.shape[2], key_cache.shape[2]
    place = cache_seqlens[:, None] - rows + torch.arange(rows, device=query.device)
    distance = torch.arange(capacity, device=query.device) - place[..., None]
    mask = (distance <= 0)[:, None]
    if window is not None and window[0] >= 0:
        mask = mask & (distance >= -window[0])[:, None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(query.shape[0], -1).to(query.dtype)
        bias = -slopes[..., None, None] * distance.abs()[:, None]
        mask = bias.masked_fill(~mask, -torch.inf)
    output, lse = attend(query, key_cache, value_cache, attn_mask=mask, **options)
    if one:
        output, lse = output.squeeze(2), lse.squeeze(2)
    return (output, lse) if return_lse else output


def _with_empty_end(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    **options: Any,
) -> Any:
    """Do the same with a cache that holds zeros behind its length, whatever it holds."""
    behind = torch.arange(key_cache.shape[2], device=query.device) >= cache_seqlens[:, None]
    key_cache, value_cache = (
        cache.masked_fill(behind[:, None, :, None], 0.0) for cache in (key_cache, value_cache)
    )
    return _eager(query, key_cache, value_cache, cache_seqlens, **options)


def _samples(new: TensorFactory) -> list[Sample]:
    device, wide = new.device, new.wide
    slopes = torch.tensor([0.5, 0.0625], device=device, dtype=wide.dtype)
    sinks = wide(2, grad=False, key="sinks")

    def call(
        lengths: tuple[int, ...],
        heads: int = 2,
        key_heads: int = 2,
        rows: int = 1,
        capacity: int = 12,
        size: int = 8,
        value_size: int = 8,
    ) -> tuple[torch.Tensor, ...]:
        batch = len(lengths)
        return (
            new(batch, heads, rows, size, grad=False, key="q"),
            new(batch, key_heads, capacity, size, grad=False, key="k"),
            new(batch, key_heads, capacity, value_size, grad=False, key="v"),
            torch.tensor(lengths, device=device, dtype=torch.int32),
        )

    q, k, v, lengths = call((3, 12, 1, 7, 5))
    return [
        Sample("ragged", (q, k, v, lengths)),
        Sample("three_dims", (q[:, :, 0], k, v, lengths)),
        Sample("grouped", call((5, 9), heads=8)),
        Sample("one_key_head", call((5, 9), heads=3, key_heads=1, size=20, value_size=36)),
        Sample("three_new_tokens", call((3, 9, 12), rows=3)),
        Sample("more_new_than_cached", call((2, 9), rows=3)),
        Sample("long", call((150, 300), heads=4, capacity=301, size=64, value_size=64)),
        Sample("empty_sequence", call((0, 4))),
        Sample("window", call((12, 3)), {"window": (4, 0)}),
        Sample("softcap_and_scale", call((12, 3)), {"softcap": 2.0, "scale": 0.5}),
        Sample("alibi", call((12, 3)), {"alibi_slopes": slopes}),
        Sample("sinks_and_log_sum_exp", call((12, 3)), {"sinks": sinks, "return_lse": True}),
        Sample("extreme_sinks", call((12, 3), heads=6), {"sinks": with_extremes(sinks.repeat(3))}),
        Sample("no_batch", call(())),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    q = torch.randn(2, 4, 1, 8, device=device)
    cache = torch.randn(2, 2, 6, 8, device=device)
    lengths = torch.tensor([3, 6], device=device)

    far, below = torch.tensor([3, 7], device=device), torch.tensor([-1, 6], device=device)
    three = cache[:, :1].repeat(1, 3, 1, 1)
    leaf = q.clone().requires_grad_()
    bad = bad_changes(query=q, key_cache=cache, value_cache=cache, cache_seqlens=lengths)
    return [
        bad("past_the_cache", "cache_seqlens", "6", "7", cache_seqlens=far),
        bad("negative", "cache_seqlens", "-1", cache_seqlens=below),
        bad("lengths_shape", "cache_seqlens", "[2]", "[1]", cache_seqlens=lengths[:1]),
        bad("heads", "heads", "3", key_cache=three, value_cache=three),
        bad("head_size", "key_cache", "4", "8", query=q[..., :4]),
        bad("batch", "key_cache", "batch", "1", query=q[:1], cache_seqlens=lengths[:1]),
        bad("value", "value_cache", "[2, 2, 6,", value_cache=cache[:, :, :5]),
        bad("rank", "query", "4 dims", query=q[0, 0]),
        bad("window", "window", "later", window=(2, 3)),
        bad("gradient", "query", "no_grad", error=UnsupportedError, query=leaf),
    ]


def _case(batch: int, heads: int, key_heads: int, filled: int, size: int) -> BenchCase:
    def make(new: TensorFactory) -> tuple[torch.Tensor, ...]:
        cache = [new(batch, key_heads, filled, size, grad=False, key=name) for name in "kv"]
        step = max(1, filled // (4 * batch))
        lengths = torch.tensor([filled - n * step for n in range(batch)], device=new.device)
        return (new(batch, heads, 1, size, grad=False), *cache, lengths)

    average = filled - filled // 8
    label = f"{batch}x{heads}/{key_heads}x{size}, {filled} cached"
    elements = (2 * batch * key_heads * average * size, 0)
    flops = (4 * batch * heads * average * size, 0)
    return BenchCase.moving(label, make, elements, flops)


SPEC = describe(attention_decode, _eager, _samples, _bad_inputs, _case)(
    non_finite=tuple(functools.partial(_with_empty_end, attend=attend) for attend in NOT_FINITE),
    bench_cases=(
        _case(8, 32, 8, 2048, 128).headlined(),
        _case(1, 12, 12, 512, 64),
        _case(1, 32, 8, 8192, 128),
    ),
    summary="attention of new tokens over a cache with ragged lengths",
    autocast="lower",
    rows_are_independent=False,
    double_backward=False,
    limits=("It has no gradient: generation has none.",),
)
