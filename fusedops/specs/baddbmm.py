"""What tests, benchmarks and documentation need to know of ``baddbmm``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fusedops.ops.baddbmm import baddbmm
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec, same_arguments


def _eager(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    if batch1.dim() == batch2.dim() == 3 and batch1.shape[0] == batch2.shape[0]:
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    leading = torch.broadcast_shapes(batch1.shape[:-2], batch2.shape[:-2])
    shape = (*leading, batch1.shape[-2], batch2.shape[-1])
    addend, first, second = (
        tensor.expand(size).reshape(math.prod(leading), *size[-2:])
        for tensor, size in (
            (input, shape),
            (batch1, (*leading, *batch1.shape[-2:])),
            (batch2, (*leading, *batch2.shape[-2:])),
        )
    )
    return torch.baddbmm(addend, first, second, beta=beta, alpha=alpha).view(shape)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)

    def call(
        name: str,
        addend: tuple[int, ...],
        first: tuple[int, ...],
        second: tuple[int, ...],
        **factors: float,
    ) -> Sample:
        scale = max(first[-1], 1) ** -0.5
        args = (new(*addend), new(*first, key="1"), new(*second, scale=scale, key="2"))
        return Sample(name, args, factors)

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
    text = {"alpha": "1"}
    return [
        BadInput("depth", (c, a, b[:, :7]), {}, ValueError, ("batch2", "8", "[4, 7, 5]")),
        BadInput("batches", (c, a, b[:3]), {}, ValueError, ("batch2", "[4]", "[3, 8, 5]")),
        BadInput("vector", (c, a[0, 0], b), {}, ValueError, ("batch1", "two dimensions", "[8]")),
        BadInput("addend", (c[:, :2], a, b), {}, ValueError, ("input", "[4, 3, 5]", "[4, 2, 5]")),
        BadInput("addend_rank", (c[None], a, b), {}, ValueError, ("input", "[1, 4, 3, 5]")),
        BadInput("batch2_dtype", (c, a, b.double()), {}, TypeError, ("batch2", "float64")),
        BadInput("input_dtype", (c.half(), a, b), {}, TypeError, ("input", "float16")),
        BadInput("batch2_missing", (c, a, None), {}, TypeError, ("batch2", "NoneType")),
        BadInput("no_tensor", (c, [1.0], b), {}, TypeError, ("batch1", "list")),
        BadInput("device", (c, a, b.to("meta")), {}, ValueError, ("batch2", "meta")),
        BadInput("integers", (c, a.long(), b), {}, TypeError, ("batch1", "int64")),
        BadInput("alpha", (c, a, b), text, TypeError, ("alpha", "str")),
        BadInput("beta", (c, a, b), {"beta": None}, TypeError, ("beta", "NoneType")),
    ]


def _case(
    label: str,
    addend: tuple[int, ...],
    first: tuple[int, ...],
    second: tuple[int, ...],
    headline: bool = False,
    **factors: float,
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        new = functools.partial(randn, device=device, dtype=dtype)
        scale = first[-1] ** -0.5
        args = (new(*addend), new(*first, key="1"), new(*second, scale=scale, key="2"))
        return Sample("bench", args, factors)

    leading = torch.broadcast_shapes(first[:-2], second[:-2])
    result = math.prod(leading) * first[-2] * second[-1]
    operands = math.prod(addend) + math.prod(first) + math.prod(second)
    flops = 2 * result * first[-1]
    return BenchCase(
        label=label,
        make=make,
        bytes_forward=lambda dtype: (operands + result) * dtype.itemsize,
        bytes_backward=lambda dtype: (2 * operands + result) * dtype.itemsize,
        flops_forward=flops,
        flops_backward=2 * flops,
        headline=headline,
    )


def _sized(batch: int, rows: int, inner: int, columns: int) -> BenchCase:
    label = f"{batch}x{rows}x{inner}x{columns}"
    return _case(label, (batch, rows, columns), (batch, rows, inner), (batch, inner, columns))


def _peers() -> dict[str, Callable[..., Any]]:
    def matmul_add(
        input: torch.Tensor,
        batch1: torch.Tensor,
        batch2: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        """Run matmul and add the addend, which broadcasts; the scale goes to the operand."""
        product = torch.matmul(batch1 if alpha == 1 else alpha * batch1, batch2)
        return product if beta == 0 else torch.add(product, input, alpha=beta)

    return {"matmul_add": matmul_add}


SPEC = Spec(
    name="baddbmm",
    op=baddbmm,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_sized,
    bench_cases=(
        _case(
            "8x12 scores 512x64x512, ALiBi",
            (12, 1, 512),
            (8, 12, 512, 64),
            (8, 12, 64, 512),
            headline=True,
            alpha=0.125,
        ),
        _case("16x256x256x256", (16, 256, 256), (16, 256, 256), (16, 256, 256), headline=True),
        _case("4x1024x768x768, bias row", (768,), (4, 1024, 768), (4, 768, 768)),
        _case("96x128x64x128", (96, 128, 128), (96, 128, 64), (96, 64, 128)),
        _case("16x12 decode 1x64x512, ALiBi", (12, 1, 512), (16, 12, 1, 64), (16, 12, 64, 512)),
        _case("256x8x8x8", (256, 8, 8), (256, 8, 8), (256, 8, 8)),
        _case("64x64x96x80, bias row", (80,), (64, 64, 96), (96, 80), alpha=0.5),
    ),
    summary="batched matrix product plus a broadcast addend",
    autocast="lower",
    peers=_peers,
    opinfo=("baddbmm",),
    from_opinfo=same_arguments,
    rows_are_independent=False,
    limits=(
        "Calls of less than 60 us can be slower than torch's in float32 on Zen 4: a call takes 4 "
        "us longer before the kernel begins. One and two threads, forward: 0.92 and 0.77 of "
        "`torch.baddbmm` at 8 x 1x64x512, 0.94 and 0.93 at 12 x 77x40x50; 39 other shapes are 0.95 "
        "or more of the better of eager and matmul + add.",
    ),
)
