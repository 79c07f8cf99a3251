"""What tests, benchmarks and documentation need to know of ``gelu``."""

from __future__ import annotations

import math

import torch

from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS
from fusedops.ops.gelu import gelu
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return ACTIVATIONS[GELU_VARIANTS[approximate]](input)


def _samples(new: TensorFactory) -> list[Sample]:
    samples = [
        Sample(f"{name}_{approximate}", (new(*shape, scale=scale),), {"approximate": approximate})
        for approximate in GELU_VARIANTS
        for name, shape, scale in (("rows", (7, 33), 1.0), ("wide", (3, 5, 17), 6.0))
    ]
    return [
        *samples,
        *(
            Sample(f"extremes_{approximate}", (with_extremes(new(8, 6)), approximate))
            for approximate in GELU_VARIANTS
        ),
        Sample("default", (new(4, 64),)),
        Sample("positional", (new(4, 64), "fast")),
        Sample("scalar", (new(),)),
        Sample("one_element", (new(1), "tanh")),
        Sample("several_blocks", (new(3, 4099), "tanh")),
        Sample("empty", (new(0, 5),)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    bad = bad_changes(input=x)
    return [
        bad("variant", "approximate", "'erf'", "'none'", approximate="erf"),
        bad("near_variant", "did you mean 'tanh'", approximate="tan"),
    ]


def _case(shape: tuple[int, ...], approximate: str) -> BenchCase:
    label = f"{'x'.join(map(str, shape))} {approximate}"
    elements = (2 * math.prod(shape), 3 * math.prod(shape))
    return BenchCase.moving(label, lambda new: (new(*shape), approximate), elements)


SPEC = describe(gelu, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case((4096, 4096), "fast").headlined(),
        _case((4096, 4096), "tanh"),
        _case((4096, 4096), "none"),
        _case((16, 3072), "fast"),
    ),
    summary="GELU: erf, tanh or fast (x * sigmoid(1.702 x))",
    autocast="keep",
    depth=depth.elementwise,
    opinfo=("nn.functional.gelu",),
)
