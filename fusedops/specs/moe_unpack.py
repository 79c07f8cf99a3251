"""What tests, benchmarks and documentation need to know of ``moe_unpack``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.ops._moe_payload import PayloadLayout, dequantize
from fusedops.ops.moe_pack import moe_pack
from fusedops.ops.moe_unpack import moe_unpack
from fusedops.specs.make import TensorFactory, randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(payload: torch.Tensor, probs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # The truth asks in float64: the layout of the bytes is that of the float32 call that made them.
    layout = PayloadLayout(like.shape[-1], like.dtype, torch.float32, probs.shape[1], True)
    data = payload[:, : layout.data_bytes].contiguous()
    scales = payload[:, layout.scale_at : layout.scale_at + 4].contiguous().view(torch.float32)
    return dequantize(data, scales, like.dtype)


def _call(
    new: TensorFactory, rows: int, hidden: int, pairs: int, scale: float = 1.0
) -> tuple[Any, ...]:
    # Made on the CPU: the bytes are the same for every backend.
    x = randn(rows, hidden, device=torch.device("cpu"), dtype=torch.float32, scale=scale)
    probs = torch.ones(rows, pairs)
    payload = moe_pack(x.detach(), probs, quantized=True).to(new.device)
    return payload, probs.to(new.device), torch.empty(0, hidden, **new.place)


def _samples(new: TensorFactory) -> list[Sample]:
    return [
        Sample("rows", _call(new, 6, 24, 2)),
        Sample("odd_sizes", _call(new, 5, 33, 3, scale=100.0)),
        Sample("long_rows", _call(new, 3, 2500, 1)),
        Sample("one_element", _call(new, 1, 1, 1)),
        Sample("no_rows", _call(new, 0, 8, 1)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    payload, probs, like = _call(TensorFactory(device, torch.float32), 4, 8, 1)

    bad = bad_changes(payload=payload, probs=probs, like=like)
    return [
        bad("hidden", "payload", "64 float8", like=like.new_empty(0, 64)),
        bad("rows", "payload", "[4, 32]", "[3, 32]", payload=payload[:3]),
        bad("pairs", "probs", "[1]", probs=probs[0]),
        bad("integers", "like", "uint8", error=TypeError, like=payload),
        bad("scalar", "like", "hidden_size", like=like.new_empty(())),
    ]


def _case(rows: int, hidden: int) -> BenchCase:
    moved = (rows * hidden, 0)
    make = functools.partial(_call, rows=rows, hidden=hidden, pairs=1)
    return BenchCase.moving(f"{rows}x{hidden}", make, moved, extra=moved)


SPEC = describe(moe_unpack, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(_case(8192, 2048).headlined(), _case(128, 2048)),
    summary="float8 rows of a received payload in a wide dtype",
    autocast="keep",
    rows_are_independent=False,
    double_backward=False,
    limits=("It has no gradient of its own: `fusedops.parallel` differentiates the exchange.",),
)
