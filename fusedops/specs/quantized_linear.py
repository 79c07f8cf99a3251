"""What tests, benchmarks and documentation need to know of ``quantized_linear``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops.ops._quantized_weights import FORMATS, dequantize, num_groups, unpack, values_of
from fusedops.ops.quantized_linear import quantized_linear
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    format: str = "int4",
    group: int = 128,
) -> torch.Tensor:
    weight = dequantize(
        qweight,
        scales,
        in_features=input.shape[-1],
        out_features=out_features,
        format=format,
        group=group,
        dtype=input.dtype,
    )
    return F.linear(input, weight, bias)


def _with_scaled_sums(
    input: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    format: str = "int4",
    group: int = 128,
) -> torch.Tensor:
    """The same with the scales applied to the sums of the groups."""
    features = input.shape[-1]
    if features == 0:
        return F.linear(input, scales.new_zeros(out_features, 0, dtype=input.dtype), bias)
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    codes = values_of(unpack(qweight, format, out_features, features), format).to(wide)
    scales_NG = scales.to(wide).transpose(1, 2).flatten(0, 1)[:out_features]
    size = group or features
    total = input.new_zeros((*input.shape[:-1], out_features), dtype=wide)
    for number in range(num_groups(features, group)):
        part = slice(number * size, (number + 1) * size)
        total = total + input[..., part].to(wide) @ codes[:, part].T * scales_NG[:, number]
    return (total if bias is None else total + bias).to(input.dtype)


def _call(
    new: TensorFactory,
    name: str,
    rows: tuple[int, ...],
    in_features: int,
    out_features: int,
    format: str = "int4",
    group: int = 32,
    bias: bool = True,
) -> Sample:
    blocks, depth = -(-out_features // 16), FORMATS[format]
    codes = new.integers(blocks, -(-in_features // depth), 64, high=256, key="q").to(torch.uint8)
    width = {"int8": 64.0, "int4": 4.0, "nf4": 0.5}[format]
    groups = num_groups(in_features, group)
    scale = max(in_features, 1) ** -0.5 / width
    scales = new(blocks, groups, 16, scale=scale, key="s", grad=False)
    added = new(out_features, key="b") if bias else None
    options = {"out_features": out_features, "format": format, "group": group}
    return Sample(name, (new(*rows, in_features), codes, scales, added), options)


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_call, new)
    return [
        call("default", (5,), 64, 32),
        call("nf4", (5,), 64, 32, "nf4"),
        call("int8", (5,), 64, 32, "int8"),
        call("odd_sizes", (3,), 101, 67),
        call("odd_sizes_int8", (7,), 45, 35, "int8", 16),
        call("one_group", (4,), 71, 18, "nf4", 0, bias=False),
        call("one_row", (), 136, 48, "int4", 64),
        call("two_rows", (2,), 80, 20, "nf4", 16),
        call("three_dims", (2, 3), 40, 17, "int8", 8, bias=False),
        call("many_rows", (37,), 101, 67, "int4", 32),
        call("many_rows_nf4", (33,), 64, 48, "nf4", 32, bias=False),
        call("many_rows_int8", (34,), 83, 40, "int8", 0),
        call("no_rows", (0,), 16, 5),
        call("no_features", (3,), 0, 5),
        call("no_outputs", (3,), 16, 0),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    new = TensorFactory(device, torch.float32, grad=False)
    sample = _call(new, "", (3,), 40, 20)
    x, codes, scales, bias = sample.args
    assert bias is not None
    change = bad_changes(input=x, qweight=codes, scales=scales)
    bad = functools.partial(change, out_features=20, group=32)
    return [
        bad("codes_shape", "qweight", "[2, 5, 64]", qweight=codes[:, :4]),
        bad("codes_dtype", "qweight", "uint8", error=TypeError, qweight=codes.char()),
        bad("scales_shape", "scales", "[2, 2, 16]", scales=scales[:, :1]),
        bad("scales_grad", "scales", "frozen", scales=scales.clone().requires_grad_()),
        bad("bias_shape", "bias", "[20]", bias=bias[:4]),
        bad("outputs", "qweight", "[3, 5, 64]", out_features=40),
        bad("group", "group", group=12),
        bad("format", "format", "int3", format="int3"),
        bad("scalar", "input", "scalar", input=x[0, 0]),
    ]


def _case(rows: int, in_features: int, out_features: int, format: str = "int4") -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        return _call(new, "bench", (rows,), in_features, out_features, format, 128, bias=False)

    product = 2 * rows * in_features * out_features
    moved = rows * (in_features + out_features)
    packed = in_features * out_features // (1 if format == "int8" else 2)
    label = f"{rows}x{in_features}->{out_features} {format}"
    return BenchCase.moving(label, make, (moved, moved), (product, product), (packed, packed))


SPEC = describe(quantized_linear, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1, 2048, 2048).headlined(),
        _case(1, 2048, 8192),
        _case(1, 2048, 2048, "int8"),
        _case(8, 2048, 2048),
        _case(512, 2048, 2048),
        _case(16, 768, 768),
    ),
    summary="linear layer with a frozen weight of 4 or 8 bits",
    autocast="lower",
    non_finite=(_eager, _with_scaled_sums),
    rows_are_independent=False,
    limits=(
        "The sums of a row are rounded in another order where a call has more than 32 rows.",
        "There is no kernel for GPUs: the weight is dequantised by torch in every call.",
    ),
)
