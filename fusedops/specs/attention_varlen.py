"""What tests, benchmarks and documentation need to know of ``attention_varlen``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.ops.attention_varlen import attention_varlen
from fusedops.specs._attention_eager import NOT_FINITE, Attend, attend
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    attend: Attend = attend,
    **options: Any,
) -> Any:
    """Attend sequence by sequence in a loop."""
    left, right = window or (-1, -1)
    outputs, lses = [], []
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(q_ends) - 1):
        q = query[q_ends[n] : q_ends[n + 1]].transpose(0, 1)[None]
        k, v = (t[k_ends[n] : k_ends[n + 1]].transpose(0, 1)[None] for t in (key, value))
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[n]
        options |= {"offset": k.shape[2] - q.shape[2], "alibi_slopes": slopes}
        output, lse = attend(q, k, v, window=(left, 0 if is_causal else right), **options)
        outputs.append(output[0].transpose(0, 1))
        lses.append(lse[0])
    output, lse = torch.cat(outputs), torch.cat(lses, 1)
    return (output, lse) if return_lse else output


def _ends(device: torch.device, *lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _samples(new: TensorFactory) -> list[Sample]:
    plain, device = new.wide, new.device
    slopes = torch.tensor([0.5, 0.0625], device=device, dtype=plain.dtype)

    def call(
        q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...] | None = None,
        heads: int = 2,
        key_heads: int = 2,
        size: int = 8,
        value_size: int = 8,
    ) -> tuple[Any, ...]:
        k_lengths = q_lengths if k_lengths is None else k_lengths
        return (
            new(sum(q_lengths), heads, size, key="q"),
            new(sum(k_lengths), key_heads, size, key="k"),
            new(sum(k_lengths), key_heads, value_size, key="v"),
            _ends(device, *q_lengths),
            _ends(device, *k_lengths),
            max(q_lengths, default=0),
            max(k_lengths, default=0),
        )

    causal = {"is_causal": True}
    return [
        Sample("causal", call((3, 1, 6)), causal),
        Sample("full", call((3, 1, 6))),
        Sample("more_keys", call((2, 5, 1), (7, 5, 4)), causal),
        Sample("fewer_keys", call((6, 2), (4, 2)), causal),
        Sample("empty_sequences", call((0, 3, 0, 2), (2, 3, 0, 0)), causal),
        Sample("long", call((70, 33), heads=1, key_heads=1, size=20, value_size=12), causal),
        Sample("grouped", call((3, 4), heads=4), causal),
        Sample("one_sequence", call((5,))),
        Sample("window", call((9, 5)), {"window": (2, 1)}),
        Sample("softcap_and_scale", call((3, 6)), {"softcap": 2.0, "scale": 0.5}),
        Sample("alibi", call((3, 6)), {**causal, "alibi_slopes": slopes}),
        Sample(
            "alibi_per_batch", call((3, 6)), {"alibi_slopes": torch.stack([slopes, 2 * slopes])}
        ),
        Sample("sinks", call((3, 6)), {**causal, "sinks": plain(2, key="sinks")}),
        Sample("extreme_sinks", call((3, 6), heads=6), {"sinks": with_extremes(plain(6, key="s"))}),
        Sample("log_sum_exp", call((3, 6)), {**causal, "return_lse": True}),
        Sample("dropout", call((3, 6)), {"dropout_p": 0.3}, random=True),
        Sample("no_tokens", call((0, 0))),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(6, 2, 8, device=device)
    ends = _ends(device, 2, 4)
    falls = torch.tensor([0, 7, 6], device=device)
    short = torch.tensor([0, 2, 5], device=device)
    late = torch.tensor([1, 2, 6], device=device)

    three_heads = {"key": x.repeat(1, 2, 1)[:, :3], "value": x.repeat(1, 2, 1)[:, :3]}
    nested = {"cu_seqlens_q": ends[None], "cu_seqlens_k": ends[None]}
    lengths = {"max_seqlen_q": 4, "max_seqlen_k": 4}
    bad = bad_changes(query=x, key=x, value=x, cu_seqlens_q=ends, cu_seqlens_k=ends, **lengths)
    return [
        bad("not_monotone", "cu_seqlens_q", "monotone", "7", cu_seqlens_q=falls, max_seqlen_q=7),
        bad("wrong_end", "cu_seqlens_k", "6", "5", cu_seqlens_k=short),
        bad("wrong_start", "cu_seqlens_q", "from 0", cu_seqlens_q=late),
        bad("longer_than_max", "cu_seqlens_q", "3", "4", max_seqlen_q=3),
        bad("no_length", "max_seqlen_k", str(2**62), max_seqlen_k=2**62),
        bad("table_shape", "cu_seqlens_k", "[2]", cu_seqlens_k=ends[:2]),
        bad("table_rank", "cu_seqlens_q", "[1, 3]", **nested),
        bad("rank", "query", "3 dims", query=x[0]),
        bad("heads", "heads", "3", **three_heads),
        bad("head_size", "key", "8", "4", key=x[..., :4]),
        bad("value_tokens", "value", "[6, 2,", value=x[:5]),
        bad("dropout", "dropout_p", "-0.1", dropout_p=-0.1),
    ]


def _case(lengths: tuple[int, ...], heads: int, size: int) -> BenchCase:
    total = sum(lengths)

    def make(new: TensorFactory) -> Sample:
        tensors = (new(total, heads, size, key=name) for name in "qkv")
        ends, longest = _ends(new.device, *lengths), max(lengths)
        return Sample("bench", (*tensors, ends, ends, longest, longest), {"is_causal": True})

    pairs = sum(length * length for length in lengths) * heads * size // 2
    label = f"{len(lengths)} sequences, {total} tokens, {heads}x{size} causal"
    elements = (4 * total * heads * size, 8 * total * heads * size)
    return BenchCase.moving(label, make, elements, (4 * pairs, 10 * pairs))


SPEC = describe(attention_varlen, _eager, _samples, _bad_inputs, _case)(
    non_finite=tuple(functools.partial(_eager, attend=attend) for attend in NOT_FINITE),
    bench_cases=(
        _case((100, 512, 37, 350, 1024, 25), 12, 64).headlined(),
        _case((64,) * 32, 12, 64),
    ),
    summary="attention over packed sequences, no padding computed",
    autocast="lower",
    rows_are_independent=False,
    limits=("alibi_slopes is not differentiable.",),
)
