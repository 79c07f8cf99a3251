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
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.wraps(moe_pack)
def _packed_and_read(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    *,
    num_rows: torch.Tensor | None = None,
    **options: Any,
) -> Parts:
    payload = moe_pack(input, probs, expert_ids, num_rows=num_rows, **options)
    layout = payload_layout(input, probs, **options)
    if options.get("quantized"):
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


def _samples(new: TensorFactory) -> list[Sample]:
    def call(tokens: int, hidden: int, top_k: int, scale: float = 1.0) -> tuple[Any, ...]:
        ids = new.integers(tokens, top_k, high=8, key="ids").to(torch.int32)
        rows = new(tokens, hidden, scale=scale, grad=False)
        return rows, new.wide(tokens, top_k, key="probs", grad=False), ids

    def order(slots: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(slots)
        return torch.randperm(slots, generator=generator).to(new.device, torch.int32)

    def number(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=new.device)

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
        Sample("no_experts", (*call(4, 8, 0)[:2], None), {}),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, probs = torch.randn(4, 8, device=device), torch.rand(4, 2, device=device)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    index = torch.arange(8, dtype=torch.int32, device=device)

    bad = bad_changes(input=x, probs=probs)
    return [
        bad("rank", "input", "[8]", input=x[0]),
        bad("no_columns", "input", "[4, 0]", input=x[:, :0]),
        bad("tokens", "probs", "[4, top_k]", "[3, 2]", probs=probs[:3]),
        bad("probs_dtype", "probs", "bfloat16", error=TypeError, probs=probs.bfloat16()),
        bad("ids_shape", "expert_ids", "[4, 1]", expert_ids=ids[:, :1]),
        bad("ids_dtype", "expert_ids", "int64", error=TypeError, expert_ids=ids.long()),
        bad("index_rank", "index", "[1, 8]", index=index[None]),
        bad("index_range", "index", "8", "row 7", index=index + 1),
        bad("index_negative", "index", "[0, 8)", index=index - 2),
        bad("count", "num_rows", "one", num_rows=index),
        bad("span", "span", "index", expert_ids=ids, span=2),
        bad("span_negative", "span", "-1", expert_ids=ids, index=index, span=-1),
    ]


def _case(tokens: int, hidden: int, top_k: int, *, quantized: bool = False) -> BenchCase:
    rows = tokens * top_k

    def make(new: TensorFactory) -> Sample:
        x = new(tokens, hidden, grad=False)
        probs = new(tokens, top_k, dtype=torch.float32, grad=False)
        ids = new.integers(tokens, top_k, high=64).to(torch.int32)
        index = torch.argsort(ids.flatten(), stable=True).to(torch.int32)
        return Sample("bench", (x, probs, ids), {"index": index, "quantized": quantized})

    # The benchmark times the reading of the parts too: a pass over them on both sides.
    label = f"{tokens}x{hidden} top-{top_k}{' float8' * quantized}"
    elements = (rows * hidden * (2 + 2 * (not quantized)), 0)
    return BenchCase.moving(label, make, elements)


SPEC = describe(_packed_and_read, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 2048, 2).headlined(),
        _case(4096, 2048, 2, quantized=True),
        _case(16, 2048, 8),
    ),
    summary="rows, probabilities and expert ids into one payload for an all-to-all",
    autocast="keep",
    rows_are_independent=False,
    double_backward=False,
    limits=("It has no gradient of its own: `fusedops.parallel` differentiates the exchange.",),
)
