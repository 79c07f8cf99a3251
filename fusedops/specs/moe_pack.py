"""What tests, benchmarks and documentation need to know of ``moe_pack``.

The tests compare what a receiver reads: rows, probabilities and ids, not bytes, whose number
depends on the dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.ops._moe_payload import dequantize, quantize
from fusedops.ops.moe_pack import moe_pack, payload_layout
from fusedops.specs.make import randint, randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec, bad

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.wraps(moe_pack)
def _packed_and_read(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    *,
    index: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    span: int = 0,
    quantized: bool = False,
) -> Parts:
    payload = moe_pack(
        input,
        probs,
        expert_ids,
        index=index,
        num_rows=num_rows,
        span=span,
        quantized=quantized,
    )
    layout = payload_layout(input, probs, index=index, span=span, quantized=quantized)
    if quantized:
        at = layout.scale_at
        scales = payload[:, at : at + 4].contiguous().view(torch.float32)
        rows = dequantize(payload[:, : input.shape[1]].contiguous(), scales, input.dtype)
    else:
        rows = layout.rows(payload).clone()
    return rows, layout.probs(payload).clone(), layout.ids(payload).clone()


def _eager(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    *,
    index: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    span: int = 0,
    quantized: bool = False,
) -> Parts:
    """Three tensors instead of one: what is sent today, in a collective each."""
    ids = torch.full_like(probs, -1, dtype=torch.int32) if expert_ids is None else expert_ids
    rows = input
    if index is not None:
        slot = index.long().clamp(0, max(0, probs.numel() - 1))
        rows = input[slot // probs.shape[1]]
        if span == 0:
            probs, ids = probs.flatten()[slot, None], ids.flatten()[slot, None]
        else:
            here = ids[slot // probs.shape[1]] // span == ids.flatten()[slot, None] // span
            probs = torch.where(here, probs[slot // probs.shape[1]], 0.0)
            ids = torch.where(here, ids[slot // ids.shape[1]], -1)
    if quantized:
        rows = dequantize(*quantize(rows), rows.dtype)
    if num_rows is not None:
        real = (torch.arange(len(rows), device=rows.device) < num_rows)[:, None]
        rows, probs = torch.where(real, rows, 0), torch.where(real, probs, 0.0)
        ids = torch.where(real, ids, 0)
    return rows, probs, ids


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, grad=False)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def call(tokens: int, hidden: int, top_k: int, scale: float = 1.0) -> tuple[Any, ...]:
        ids = randint(tokens, top_k, high=8, device=device, key="ids").to(torch.int32)
        rows = new(tokens, hidden, dtype=dtype, scale=scale)
        return rows, new(tokens, top_k, dtype=wide, key="probs"), ids

    def order(slots: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(slots)
        return torch.randperm(slots, generator=generator).to(device, torch.int32)

    def number(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    few, wild = call(6, 24, 2), call(5, 33, 3, scale=1e4)
    return [
        Sample("slots", few, {"index": order(12)}),
        Sample("some_rows", few, {"index": order(12), "num_rows": number(7)}),
        Sample("no_real_rows", few, {"index": order(12), "num_rows": number(0)}),
        Sample("tokens", few, {"index": order(12)[:5], "span": 4}),
        Sample("odd_sizes", wild, {"index": order(15)[:7]}),
        Sample("every_token", wild, {}),
        Sample("without_ids", wild[:2], {}),
        Sample("float8", wild, {"index": order(15), "quantized": True}),
        Sample("float8_tiny", call(3, 64, 1, scale=1e-30), {"quantized": True}),
        Sample("float8_tokens", wild, {"index": order(15), "span": 2, "quantized": True}),
        Sample("one_element", call(1, 1, 1), {"index": order(1)}),
        Sample("long_rows", call(3, 2500, 2), {"index": order(6)}),
        Sample("no_tokens", call(0, 8, 2), {"index": order(0)}),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, probs = torch.randn(4, 8, device=device), torch.rand(4, 2, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    index = torch.arange(8, dtype=torch.int32, device=device)

    return [
        bad("rank", x[0], probs, mentions=("input", "[8]")),
        bad("no_columns", x[:, :0], probs, mentions=("input", "[4, 0]")),
        bad("tokens", x, probs[:3], mentions=("probs", "[4, top_k]", "[3, 2]")),
        bad("probs_dtype", x, probs.bfloat16(), error=TypeError, mentions=("probs", "bfloat16")),
        bad("ids_shape", x, probs, ids[:, :1], mentions=("expert_ids", "[4, 1]")),
        bad("ids_dtype", x, probs, ids.long(), error=TypeError, mentions=("expert_ids", "int64")),
        bad("index_rank", x, probs, index=index[None], mentions=("index", "[1, 8]")),
        bad("index_range", x, probs, index=index + 1, mentions=("index", "8", "row 7")),
        bad("index_negative", x, probs, index=index - 2, mentions=("index", "[0, 8)")),
        bad("count", x, probs, num_rows=index, mentions=("num_rows", "one")),
        bad("span", x, probs, ids, span=2, mentions=("span", "index")),
        bad("span_negative", x, probs, ids, index=index, span=-1, mentions=("span", "-1")),
        bad("span_type", x, probs, span=None, error=TypeError, mentions=("span", "NoneType")),
        bad("quantized", x, probs, quantized=None, error=TypeError, mentions=("quantized", "None")),
        bad("device", x, probs.to("meta"), mentions=("probs", "meta")),
        bad("no_tensor", x, probs, [1], error=TypeError, mentions=("expert_ids", "list")),
    ]


def _case(
    tokens: int, hidden: int, top_k: int, *, quantized: bool = False, headline: bool = False
) -> BenchCase:
    rows = tokens * top_k

    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        x = randn(tokens, hidden, device=device, dtype=dtype, grad=False)
        probs = randn(tokens, top_k, device=device, dtype=torch.float32, grad=False)
        ids = randint(tokens, top_k, high=64, device=device).to(torch.int32)
        index = torch.argsort(ids.flatten(), stable=True).to(torch.int32)
        return Sample("bench", (x, probs, ids), {"index": index, "quantized": quantized})

    # The benchmark times the reading of the parts too: a pass over them on both sides.
    return BenchCase(
        label=f"{tokens}x{hidden} top-{top_k}{' float8' * quantized}",
        make=make,
        bytes_forward=lambda dtype: rows * hidden * (2 + 2 * (not quantized)) * dtype.itemsize,
        bytes_backward=lambda dtype: 0,
        headline=headline,
    )


SPEC = Spec(
    name="moe_pack",
    op=_packed_and_read,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(4096, 2048, 2, headline=True),
        _case(4096, 2048, 2, quantized=True),
        _case(16, 2048, 8),
    ),
    summary="rows, probabilities and expert ids into one payload for an all-to-all",
    autocast="keep",
    rows_are_independent=False,
    double_backward=False,
    limits=("It has no gradient of its own: `fusedops.parallel` differentiates the exchange.",),
)
