"""What tests, benchmarks and documentation need to know of ``baddbmm``."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fusedops.ops.baddbmm import baddbmm
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **factors: Any
) -> torch.Tensor:
    if batch1.dim() == batch2.dim() == 3 and batch1.shape[0] == batch2.shape[0]:
        return torch.baddbmm(input, batch1, batch2, **factors)
    leading = torch.broadcast_shapes(batch1.shape[:-2], batch2.shape[:-2])
    shape = (*leading, batch1.shape[-2], batch2.shape[-1])
    addend, first, second = (
        tensor.expand(*leading, *size).reshape(math.prod(leading), *size)
        for tensor, size in (
            (input, shape[-2:]),
            (batch1, batch1.shape[-2:]),
            (batch2, batch2.shape[-2:]),
        )
    )
    return torch.baddbmm(addend, first, second, **factors).view(shape)


def _call(
    new: TensorFactory,
    name: str,
    addend: tuple[int, ...],
    first: tuple[int, ...],
    second: tuple[int, ...],
    **factors: float,
) -> Sample:
    scale = max(first[-1], 1) ** -0.5
    args = (new(*addend), new(*first, key="1"), new(*second, scale=scale, key="2"))
    return Sample(name, args, factors)


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_call, new)
    keys = new(2, 3, 7, 6, scale=0.4, key="keys").detach().mT.requires_grad_()
    return [
        call("default", (4, 5, 7), (4, 5, 6), (4, 6, 7)),
        call("alibi", (1, 3, 1, 7), (2, 3, 5, 6), (2, 3, 6, 7), alpha=0.125),
        Sample("transposed_keys", (new(3, 1, 7), new(2, 3, 5, 6, key="1"), keys), {"alpha": 0.5}),
        call("bias_row", (7,), (2, 3, 5, 6), (6, 7)),
        call("bias_column", (3, 5, 1), (2, 3, 5, 6), (3, 6, 7), beta=-2),
        call("both_broadcast", (2, 1, 5, 7), (2, 1, 5, 6), (3, 6, 7), beta=0.5, alpha=2),
        call("number", (), (2, 5, 6), (2, 6, 7), beta=3),
        call("matrices", (5, 7), (5, 6), (6, 7)),
        call("beta_zero", (3, 5, 7), (3, 5, 6), (3, 6, 7), beta=0),
        call("one_row", (2, 3, 1, 9), (2, 3, 1, 33), (2, 3, 33, 9)),
        call("one_element", (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        call("odd_sizes", (65,), (3, 37, 101), (3, 101, 65)),
        call("no_batch", (0, 5, 7), (0, 5, 6), (0, 6, 7)),
        call("no_rows", (1, 7), (2, 0, 6), (2, 6, 7)),
        call("no_depth", (5, 1), (2, 5, 0), (2, 0, 7)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    a, b = torch.randn(4, 3, 8, device=device), torch.randn(4, 8, 5, device=device)
    c = torch.randn(4, 3, 5, device=device)
    bad = bad_changes(input=c, batch1=a, batch2=b)
    return [
        bad("depth", "batch2", "8", "[4, 7, 5]", batch2=b[:, :7]),
        bad("batches", "batch2", "[4]", "[3, 8, 5]", batch2=b[:3]),
        bad("vector", "batch1", "two dimensions", "[8]", batch1=a[0, 0]),
        bad("addend", "input", "[4, 3, 5]", "[4, 2, 5]", input=c[:, :2]),
        bad("addend_rank", "input", "[1, 4, 3, 5]", input=c[None]),
    ]


def _case(
    label: str,
    addend: tuple[int, ...],
    first: tuple[int, ...],
    second: tuple[int, ...],
    **factors: float,
) -> BenchCase:
    leading = torch.broadcast_shapes(first[:-2], second[:-2])
    result = math.prod(leading) * first[-2] * second[-1]
    operands = math.prod(addend) + math.prod(first) + math.prod(second)
    flops = 2 * result * first[-1]
    elements = (operands + result, 2 * operands + result)
    return BenchCase.moving(
        label,
        lambda new: _call(new, "bench", addend, first, second, **factors),
        elements,
        (flops, 2 * flops),
    )


def _sized(batch: int, rows: int, inner: int, columns: int) -> BenchCase:
    label = f"{batch}x{rows}x{inner}x{columns}"
    return _case(label, (batch, rows, columns), (batch, rows, inner), (batch, inner, columns))


_ALIBI = "8x12 scores 512x64x512, ALiBi"
SPEC = describe(baddbmm, _eager, _samples, _bad_inputs, _sized)(
    bench_cases=(
        _case(_ALIBI, (12, 1, 512), (8, 12, 512, 64), (8, 12, 64, 512), alpha=0.125).headlined(),
        _case("16x256x256x256", (16, 256, 256), (16, 256, 256), (16, 256, 256)).headlined(),
        _case("4x1024x768x768, bias row", (768,), (4, 1024, 768), (4, 768, 768)),
        _case("96x128x64x128", (96, 128, 128), (96, 128, 64), (96, 64, 128)),
        _case("16x12 decode 1x64x512, ALiBi", (12, 1, 512), (16, 12, 1, 64), (16, 12, 64, 512)),
        _case("256x8x8x8", (256, 8, 8), (256, 8, 8), (256, 8, 8)),
        _case("64x64x96x80, bias row", (80,), (64, 64, 96), (96, 80), alpha=0.5),
    ),
    summary="batched matrix product plus a broadcast addend",
    autocast="lower",
    opinfo=("baddbmm",),
    rows_are_independent=False,
    limits=(
        "Calls of less than 60 us can be slower than torch's in float32 on Zen 4: a call takes 4 "
        "us longer before the kernel begins. One and two threads, forward: 0.92 and 0.77 of "
        "`torch.baddbmm` at 8 x 1x64x512, 0.94 and 0.93 at 12 x 77x40x50; 39 other shapes are 0.95 "
        "or more of the better of eager and matmul + add.",
    ),
)
