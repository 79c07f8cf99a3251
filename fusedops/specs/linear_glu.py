"""What tests, benchmarks and documentation need to know of ``linear_glu``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.linear_glu import linear_glu
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    gate, up = F.linear(input, gate_weight), F.linear(input, up_weight)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ACTIVATIONS[activation](gate) * up


def _call(
    new: TensorFactory,
    name: str,
    rows: tuple[int, ...],
    in_features: int,
    out_features: int,
    activation: str = "silu",
) -> Sample:
    scale = max(in_features, 1) ** -0.5
    weights = (new(out_features, in_features, scale=scale, key=key) for key in ("gate", "up"))
    return Sample(name, (new(*rows, in_features), *weights), {"activation": activation})


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_call, new)
    plain = new(17, 12, scale=0.25, key="gate")
    transposed = new(12, 17, scale=0.25, key="up").detach().t().requires_grad_()
    same = torch.eye(6, device=new.device, dtype=new.dtype).requires_grad_()
    extremes = with_extremes(new(9, 6)), same, new(6, 6, scale=0.25, key="up")
    return [
        Sample("default", (new(5, 12), plain, new(17, 12, scale=0.25, key="up"))),
        *(call(name, (7,), 33, 18, name) for name in ACTIVATIONS),
        *(Sample(f"extremes_{name}", extremes, {"activation": name}) for name in ("silu", "gelu")),
        Sample("one_transposed_weight", (new(5, 12), plain, transposed)),
        *(
            Sample(f"limit_{name}", extremes, {"activation": name, "limit": 0.875})
            for name in ("silu", "gelu_tanh", "relu")
        ),
        call("three_dims", (2, 3), 20, 9, "gelu"),
        call("one_row", (), 40, 11, "gelu_tanh"),
        call("one_element", (1,), 1, 1),
        call("odd_sizes", (37,), 101, 67),
        call("no_rows", (0,), 8, 5),
        call("no_features", (3,), 0, 5),
        call("no_outputs", (3,), 8, 0),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    gate, up = torch.randn(5, 8, device=device), torch.randn(5, 8, device=device)
    bad = bad_changes(input=x, gate_weight=gate, up_weight=up)
    return [
        bad("gate_shape", "gate_weight", "8", "[8, 5]", gate_weight=gate.t()),
        bad("gate_rank", "gate_weight", "[8]", gate_weight=gate[0]),
        bad("up_shape", "up_weight", "[5, 8]", "[4, 8]", up_weight=up[:4]),
        bad("scalar", "input", "scalar", input=x[0, 0]),
        bad("limit", "limit", "positive", limit=0.0),
    ]


def _case(rows: int, in_features: int, out_features: int, activation: str = "silu") -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        return _call(new, "bench", (rows,), in_features, out_features, activation)

    product = rows * in_features * out_features
    x, w, y = rows * in_features, in_features * out_features, rows * out_features
    label = f"{rows}x{in_features}->{out_features} {activation}"
    elements = (x + 2 * w + 3 * y, 2 * x + 4 * w + 5 * y)
    return BenchCase.moving(label, make, elements, (4 * product, 8 * product))


SPEC = describe(linear_glu, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1024, 768, 2048).headlined(),
        _case(4096, 512, 1408),
        _case(2048, 1024, 2816, "gelu_tanh"),
        _case(512, 2048, 5632),
        _case(128, 768, 2048),
        _case(16, 768, 2048),
    ),
    summary="two linear layers, one activated and multiplied by the other, in one product",
    autocast="lower",
)
