"""What tests, benchmarks and documentation need to know of ``bias_dropout_add``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.specs import _add_norm, depth
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec


def _eager(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float = 0.0,
    training: bool = True,
) -> torch.Tensor:
    return residual + F.dropout(input if bias is None else input + bias, p, training)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    stream = functools.partial(randn, device=device, dtype=wide)

    def call(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return new(*shape), new(shape[-1], key="bias"), new(*shape, key="residual")

    def without_bias(*shape: int) -> tuple[torch.Tensor, None, torch.Tensor]:
        return new(*shape), None, new(*shape, key="residual")

    residual = stream(6, 40, key="residual")
    return [
        Sample("rows", call(7, 33)),
        Sample("three_dims", call(2, 3, 64)),
        Sample("no_bias", without_bias(7, 33)),
        Sample("one_dim", call(129)),
        Sample("one_column", call(3, 1)),
        Sample("many_rows", call(70, 48)),
        Sample("no_rows", call(0, 33)),
        Sample("float32_residual", (new(6, 40), new(40, key="bias"), residual)),
        Sample("float32_bias", (new(6, 40), stream(40, key="bias"), new(6, 40, key="residual"))),
        Sample("dropout", (*call(7, 33), 0.3), random=True),
        Sample("dropout_no_bias", (*without_bias(2, 3, 64), 0.1), random=True),
        Sample(
            "dropout_float32_residual",
            (new(6, 40), stream(40, key="bias"), residual, 0.5),
            random=True,
        ),
        Sample("dropout_of_all", (*call(4, 17), 1.0), random=True),
        Sample("dropout_no_rows", (*call(0, 33), 0.3), random=True),
        Sample("evaluation", (*call(7, 33), 0.3, False)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, bias = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    narrow = torch.zeros(3, 8, device=device, dtype=torch.float8_e4m3fn)
    return [
        BadInput("residual_shape", (x, bias, x[:2]), {}, ValueError, ("residual", "[3, 8]")),
        BadInput("residual_device", (x, bias, x.to("meta")), {}, ValueError, ("residual", "meta")),
        BadInput("no_residual", (x, bias, None), {}, TypeError, ("residual", "NoneType")),
        BadInput("residual_dtype", (x, bias, narrow), {}, TypeError, ("residual", "float8_e4m3fn")),
        BadInput("bias_float8", (x, narrow[0], x), {}, TypeError, ("bias", "float8_e4m3fn")),
        BadInput("bias_shape", (x, bias[:7], x), {}, ValueError, ("bias", "[8]", "[7]")),
        BadInput("bias_rank", (x, x, x), {}, ValueError, ("bias", "[8]", "[3, 8]")),
        BadInput("bias_dtype", (x, bias.long(), x), {}, TypeError, ("bias", "int64")),
        BadInput("bias_of_a_scalar", (x.sum(), bias, x.sum()), {}, ValueError, ("input",)),
        BadInput("integers", (x.long(), bias, x), {}, TypeError, ("input", "int64")),
        BadInput("p_above", (x, bias, x, 1.5), {}, ValueError, ("p ", "1.5")),
        BadInput("p_below", (x, bias, x, -0.1), {}, ValueError, ("p ", "-0.1")),
        BadInput("p_type", (x, bias, x, "0.1"), {}, TypeError, ("p ", "str")),
    ]


def _case(
    rows: int, columns: int, p: float, *, bias: bool = False, headline: bool = False
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        new = functools.partial(randn, device=device, dtype=dtype)
        added = new(columns, key="bias") if bias else None
        data = (new(rows, columns), added, new(rows, columns, key="residual"), p)
        return Sample("bench", data, random=p > 0)

    return BenchCase(
        label=f"{rows}x{columns}, dropout {p}" + (", bias" if bias else ""),
        make=make,
        bytes_forward=lambda dtype: 3 * rows * columns * dtype.itemsize,
        bytes_backward=lambda dtype: 2 * rows * columns * dtype.itemsize,
        headline=headline,
    )


SPEC = Spec(
    name="bias_dropout_add",
    op=bias_dropout_add,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(4096, 1024, 0.1, headline=True),
        _case(4096, 1024, 0.1, bias=True, headline=True),
        _case(8192, 4096, 0.1),
        _case(16, 768, 0.1, bias=True),
    ),
    summary="bias, dropout and residual sum",
    autocast="keep",
    depth=depth.elementwise,
    limits=_add_norm.LIMITS,
)
