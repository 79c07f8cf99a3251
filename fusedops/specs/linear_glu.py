"""What tests, benchmarks and documentation need to know of ``linear_glu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.linear_glu import linear_glu
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec


def _eager(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *,
    activation: str = "silu",
) -> torch.Tensor:
    return ACTIVATIONS[activation](F.linear(input, gate_weight)) * F.linear(input, up_weight)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)

    def call(
        name: str,
        rows: tuple[int, ...],
        in_features: int,
        out_features: int,
        activation: str = "silu",
    ) -> Sample:
        scale = max(in_features, 1) ** -0.5
        weights = (new(out_features, in_features, scale=scale, key=key) for key in ("gate", "up"))
        return Sample(name, (new(*rows, in_features), *weights), {"activation": activation})

    plain = new(17, 12, scale=0.25, key="gate")
    transposed = new(12, 17, scale=0.25, key="up").detach().t().requires_grad_()
    return [
        Sample("default", (new(5, 12), plain, new(17, 12, scale=0.25, key="up"))),
        *(call(name, (7,), 33, 18, name) for name in ACTIVATIONS),
        Sample("one_transposed_weight", (new(5, 12), plain, transposed)),
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
    unknown = {"activation": "swish"}
    return [
        BadInput("gate_shape", (x, gate.t(), up), {}, ValueError, ("gate_weight", "8", "[8, 5]")),
        BadInput("gate_rank", (x, gate[0], up), {}, ValueError, ("gate_weight", "[8]")),
        BadInput("gate_dtype", (x, gate.double(), up), {}, TypeError, ("gate_weight", "float64")),
        BadInput("gate_missing", (x, None, up), {}, TypeError, ("gate_weight", "NoneType")),
        BadInput("up_shape", (x, gate, up[:4]), {}, ValueError, ("up_weight", "[5, 8]", "[4, 8]")),
        BadInput("up_dtype", (x, gate, up.half()), {}, TypeError, ("up_weight", "float16")),
        BadInput("up_missing", (x, gate, None), {}, TypeError, ("up_weight", "NoneType")),
        BadInput("device", (x, gate, up.to("meta")), {}, ValueError, ("up_weight", "meta")),
        BadInput("scalar", (x[0, 0], gate, up), {}, ValueError, ("input", "scalar")),
        BadInput("integers", (x.long(), gate, up), {}, TypeError, ("input", "int64")),
        BadInput("no_tensor", ([1.0], gate, up), {}, TypeError, ("input", "list")),
        BadInput("activation", (x, gate, up), unknown, ValueError, ("activation", "'swish'")),
    ]


def _case(
    rows: int,
    in_features: int,
    out_features: int,
    activation: str = "silu",
    headline: bool = False,
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        new = functools.partial(randn, device=device, dtype=dtype)
        scale = in_features**-0.5
        weights = (new(out_features, in_features, scale=scale, key=key) for key in ("gate", "up"))
        return Sample("bench", (new(rows, in_features), *weights), {"activation": activation})

    x, w, y = rows * in_features, in_features * out_features, rows * out_features
    return BenchCase(
        label=f"{rows}x{in_features}->{out_features} {activation}",
        make=make,
        bytes_forward=lambda dtype: (x + 2 * w + 3 * y) * dtype.itemsize,
        bytes_backward=lambda dtype: (2 * x + 4 * w + 5 * y) * dtype.itemsize,
        flops_forward=4 * rows * in_features * out_features,
        flops_backward=8 * rows * in_features * out_features,
        headline=headline,
    )


def _peers() -> dict[str, Callable[..., Any]]:
    if not torch.backends.mkldnn.is_available():
        return {}

    def onednn(
        input: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        *,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Run oneDNN's products through torch's own op, with all that it fuses."""
        pointwise = torch.ops.mkldnn._linear_pointwise
        fused = {
            "silu": ("swish", ""),
            "gelu": ("gelu", "none"),
            "gelu_tanh": ("gelu", "tanh"),
            "relu": ("relu", ""),
        }
        post, algorithm = fused.get(activation, ("none", ""))
        gate = pointwise(input, gate_weight, None, post, [], algorithm)
        gate = gate if activation in fused else ACTIVATIONS[activation](gate)
        return pointwise.binary(input, gate, up_weight, None, "mul")

    return {"onednn": onednn}


SPEC = Spec(
    name="linear_glu",
    op=linear_glu,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(1024, 768, 2048, headline=True),
        _case(4096, 512, 1408),
        _case(2048, 1024, 2816, "gelu_tanh"),
        _case(512, 2048, 5632),
        _case(128, 768, 2048),
        _case(16, 768, 2048),
    ),
    summary="two linear layers, one activated and multiplied by the other, in one product",
    autocast="lower",
    peers=_peers,
)
