"""What tests, benchmarks and documentation need to know of ``rms_norm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fusedops.ops.rms_norm import rms_norm
from fusedops.specs import depth
from fusedops.specs.layer_norm import bad_inputs_of_norms
from fusedops.specs.make import TensorFactory, common_offset
from fusedops.specs.spec import BenchCase, Sample, describe


def eager_rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
) -> torch.Tensor:
    """Return what a model writes: torch's function, Gemma's ``1 + w`` or Llama's two roundings."""
    if rounding == "torch" and weight_offset == 0.0:
        return F.rms_norm(input, normalized_shape, weight, eps)
    x = input.double() if input.dtype == torch.float64 else input.float()
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)
    if rounding == "hf":
        x = x.to(input.dtype)
        return x if weight is None else (weight + weight_offset) * x
    return (x if weight is None else x * (weight_offset + weight.to(x))).type_as(input)


def _samples(new: TensorFactory) -> list[Sample]:
    weight = new(33, key="weight", shift=1.0)
    wide_weight = new.wide(33, key="weight", shift=1.0)
    return [
        Sample("rows", (new(7, 33), (33,), weight)),
        Sample("offset", (new(7, 33, shift=common_offset(new.dtype)), (33,), weight)),
        Sample("three_dims", (new(2, 3, 64), (64,), new(64, shift=1.0)), {"eps": 1e-3}),
        Sample("two_normalized_dims", (new(5, 4, 6), (4, 6), new(4, 6, shift=1.0))),
        Sample("no_weight", (new(4, 17), (17,))),
        Sample("one_row", (new(129), (129,), new(129, shift=1.0))),
        Sample("one_column", (new(3, 1), (1,), new(1, shift=1.0))),
        Sample("five_columns", (new(3, 5), (5,), new(5, shift=1.0))),
        Sample("many_rows", (new(70, 48), (48,), new(48, shift=1.0))),
        Sample("long_rows", (new(2, 33000), (33000,), new(33000, shift=1.0))),
        Sample("no_rows", (new(0, 33), (33,), weight)),
        Sample("weight_offset", (new(7, 33), (33,), new(33)), {"weight_offset": 1.0}),
        Sample("no_weight_offset", (new(4, 17), (17,)), {"weight_offset": 1.0}),
        Sample("hf", (new(7, 33), (33,), weight, 1e-6), {"rounding": "hf"}),
        Sample("hf_no_weight", (new(4, 17), (17,)), {"rounding": "hf"}),
        Sample("wide_weight", (new(7, 33), (33,), wide_weight)),
        Sample("hf_wide_weight", (new(7, 33), (33,), wide_weight), {"rounding": "hf"}),
    ]


def _case(rows: int, columns: int, rounding: str = "torch") -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        data = (new(rows, columns), (columns,), new(columns, shift=1.0, key="w"), 1e-6)
        return Sample("bench", data, {"rounding": rounding} if rounding != "torch" else {})

    size = rows * columns
    label = f"{rows}x{columns}" + (f", {rounding}" if rounding != "torch" else "")
    return BenchCase.moving(label, make, (2 * size, 3 * size))


SPEC = describe(rms_norm, eager_rms_norm, _samples, bad_inputs_of_norms, _case)(
    bench_cases=(
        _case(4096, 768),
        _case(4096, 1024).headlined(),
        _case(4096, 1024, rounding="hf").headlined(),
        _case(8192, 4096),
        _case(16384, 256),
        _case(16, 768),
    ),
    summary="divide rows by their root mean square and scale",
    autocast="norm",
    depth=depth.of_rows(depth.normalized(1)),
    opinfo=("nn.functional.rms_norm",),
    limits=(
        "On a GPU the roundings are those of the models, but the order of the sum of squares is "
        "not: results differ in the last place.",
    ),
)
