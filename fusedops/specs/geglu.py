"""What tests, benchmarks and documentation need to know of ``geglu``."""

from __future__ import annotations

import math

import torch

from fusedops._core.activation import ACTIVATIONS, FAST_GELU_SLOPE, GELU_VARIANTS
from fusedops.ops.geglu import geglu
from fusedops.specs import _glu, depth
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BenchCase, Sample, describe


def _eager(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return ACTIVATIONS[GELU_VARIANTS[approximate]](gate) * up


def _with_tails(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Compute the same with gelu's far tail, which torch rounds to 0: times inf that is NaN."""
    if approximate == "none":
        return gate * (0.5 * torch.special.erfc(gate * -math.sqrt(0.5))) * up
    cubic = gate + 0.044715 * gate**3 if approximate == "tanh" else gate
    slope = math.sqrt(8 / math.pi) if approximate == "tanh" else FAST_GELU_SLOPE
    return gate * torch.sigmoid(slope * cubic) * up


def _samples(new: TensorFactory) -> list[Sample]:
    variants = [
        Sample(
            f"{name}_{approximate}",
            (new(*shape, scale=scale), new(*shape, key="up")),
            {"approximate": approximate},
        )
        for approximate in GELU_VARIANTS
        for name, shape, scale in (("rows", (7, 33), 1.0), ("wide", (3, 5, 17), 6.0))
    ]
    extremes = [
        Sample(f"extremes_{name}", (with_extremes(new(8, 6)), new(8, 6, key="up"), name))
        for name in GELU_VARIANTS
    ]
    return [*variants, *extremes, *_glu.samples(new)]


def _sized(rows: int, columns: int, approximate: str = "tanh") -> BenchCase:
    return _glu.case(rows, columns, approximate)


SPEC = describe(geglu, _eager, _samples, _glu.bad_inputs, _sized)(
    non_finite=(_eager, _with_tails),
    bench_cases=(
        _glu.case(4096, 4096, "tanh").headlined(),
        _glu.case(4096, 4096, "none"),
        _glu.case(2048, 11008, "tanh", chunks=True),
        _glu.case(16, 4096, "tanh"),
    ),
    summary="gelu(gate) * up, all three variants",
    autocast="keep",
    depth=depth.elementwise,
)
