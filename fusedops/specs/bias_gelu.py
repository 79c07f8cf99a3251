"""What tests, benchmarks and documentation need to know of ``bias_gelu``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS
from fusedops.ops.bias_gelu import bias_gelu
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return ACTIVATIONS[GELU_VARIANTS[approximate]](input + bias)


def _samples(new: TensorFactory) -> list[Sample]:
    samples = [
        Sample(f"{name}_{approximate}", (new(*shape), new(shape[-1], key="bias"), approximate))
        for approximate in GELU_VARIANTS
        for name, shape in (("rows", (7, 33)), ("many_rows", (70, 48)))
    ]
    return [
        *samples,
        *(
            Sample(f"extremes_{name}", (with_extremes(new(8, 6)), new(6, key="bias"), name))
            for name in GELU_VARIANTS
        ),
        Sample("wide", (new(9, 130, scale=5.0), new(130, key="bias")), {"approximate": "tanh"}),
        Sample("default", (new(2, 3, 64), new(64, key="bias"))),
        Sample("one_row", (new(129), new(129, key="bias"), "fast")),
        Sample("one_column", (new(3, 1), new(1, key="bias"))),
        Sample("several_blocks", (new(5, 600), new(600, key="bias"), "tanh")),
        Sample("no_rows", (new(0, 33), new(33, key="bias"))),
        Sample("no_columns", (new(3, 0), new(0, key="bias"))),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, bias = torch.randn(3, 8, device=device), torch.zeros(8, device=device)
    bad = bad_changes(input=x, bias=bias)
    return [
        bad("bias_shape", "bias", "[8]", "[7]", bias=bias[:7]),
        bad("bias_broadcast", "bias", "[1]", bias=bias[:1]),
        bad("bias_rank", "bias", "[1, 8]", bias=bias[None]),
        bad("scalar", "input", "scalar", input=x[0, 0]),
    ]


def _case(rows: int, columns: int, approximate: str) -> BenchCase:
    def make(new: TensorFactory) -> tuple[Any, ...]:
        return new(rows, columns), new(columns, key="bias"), approximate

    size = rows * columns
    label = f"{rows}x{columns} {approximate}"
    return BenchCase.moving(label, make, (2 * size, 3 * size))


SPEC = describe(bias_gelu, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 4096, "tanh").headlined(),
        _case(4096, 4096, "none"),
        _case(4096, 4096, "fast"),
        _case(8192, 3072, "tanh"),
        _case(16, 3072, "tanh"),
    ),
    summary="bias + GELU in one pass",
    autocast="promote",
    depth=depth.elementwise,
)
