"""What tests, benchmarks and documentation need to know of ``layer_norm``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.layer_norm import layer_norm
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory, common_offset
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _samples(new: TensorFactory) -> list[Sample]:
    weight, bias = new(33, key="weight", shift=1.0), new(33, key="bias")

    def call(*shape: int, dims: int = 1) -> tuple[Any, ...]:
        normalized = shape[-dims:]
        return new(*shape), normalized, new(*normalized, shift=1.0), new(*normalized, key="b")

    return [
        Sample("rows", (new(7, 33), (33,), weight, bias)),
        Sample("offset", (new(7, 33, shift=1e3), (33,), weight, bias)),
        Sample("large_offset", (new(7, 33, shift=common_offset(new.dtype)), (33,), weight, bias)),
        Sample("three_dims", call(2, 3, 64), {"eps": 1e-3}),
        Sample("two_normalized_dims", call(5, 4, 6, dims=2)),
        Sample("no_parameters", (new(4, 17), (17,))),
        Sample("weight_only", (new(4, 33), (33,), weight)),
        Sample("bias_only", (new(4, 33), (33,), None, bias)),
        Sample("one_row", call(129)),
        Sample("one_column", call(3, 1)),
        Sample("many_rows", call(70, 48)),
        Sample("long_rows", call(2, 33000)),
        Sample("no_rows", (new(0, 33), (33,), weight, bias)),
    ]


def bad_inputs_of_norms(device: torch.device) -> list[BadInput]:
    """Return the calls that must raise in ``rms_norm`` too."""
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    bad = bad_changes(input=x, normalized_shape=(8,))
    return [
        bad("normalized_shape", "normalized_shape", "7", normalized_shape=(7,)),
        bad("no_shape", "normalized_shape", normalized_shape=()),
        bad("weight_shape", "weight", "[8]", "[7]", weight=weight[:7]),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    bad = bad_changes(input=torch.randn(3, 8, device=device), normalized_shape=(8,))
    bias = torch.ones(1, device=device)
    return [*bad_inputs_of_norms(device), bad("bias_shape", "bias", "[1]", bias=bias)]


def _case(rows: int, columns: int) -> BenchCase:
    def make(new: TensorFactory) -> tuple[Any, ...]:
        parameters = (new(columns, shift=1.0, key="w"), new(columns, key="b"))
        return (new(rows, columns), (columns,), *parameters)

    size = rows * columns
    return BenchCase.moving(f"{rows}x{columns}", make, (2 * size, 3 * size))


SPEC = describe(layer_norm, F.layer_norm, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 768),
        _case(4096, 1024).headlined(),
        _case(8192, 4096),
        _case(16384, 256),
        _case(16, 768),
    ),
    summary="normalise rows, scale and shift",
    autocast="norm",
    depth=depth.of_rows(depth.normalized(1)),
    opinfo=("nn.functional.layer_norm",),
)
