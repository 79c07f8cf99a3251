"""What tests, benchmarks and documentation need to know of ``mlp``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.mlp import mlp
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec


def _eager(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str = "fast_gelu",
    recompute: bool = False,
) -> torch.Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(input, w1, b1)), w2, b2)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)

    def call(
        name: str,
        rows: tuple[int, ...],
        sizes: tuple[int, int, int],
        activation: str = "fast_gelu",
        biases: tuple[bool, bool] = (True, True),
        recompute: bool = False,
    ) -> Sample:
        in_features, hidden, out = sizes
        args = (
            new(*rows, in_features),
            new(hidden, in_features, scale=max(in_features, 1) ** -0.5, key="w1"),
            new(hidden, key="b1") if biases[0] else None,
            new(out, hidden, scale=max(hidden, 1) ** -0.5, key="w2"),
            new(out, key="b2") if biases[1] else None,
        )
        return Sample(name, args, {"activation": activation, "recompute": recompute})

    conv1d = [
        new(*shape, scale=0.25, key=f"{shape}").detach().t().requires_grad_()
        for shape in ((9, 21), (21, 10))
    ]
    return [
        call("rows", (7,), (12, 19, 10)),
        call("recompute", (7,), (12, 19, 10), "gelu", recompute=True),
        *(call(name, (5,), (11, 18, 9), name) for name in ("identity", "relu", "relu2", "silu")),
        call("no_biases", (6,), (11, 18, 9), "gelu_tanh", (False, False)),
        call("first_bias", (2, 3), (11, 18, 9), "gelu", (True, False), recompute=True),
        call("second_bias", (2, 3), (11, 18, 9), "gelu", (False, True)),
        Sample("conv1d_weights", (new(5, 9), conv1d[0], new(21, key="b"), conv1d[1], None)),
        call("one_row", (), (12, 19, 10)),
        call("odd_sizes", (37,), (65, 101, 43)),
        call("no_rows", (0,), (12, 19, 10)),
        call("no_hidden", (3,), (12, 0, 10)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, w1 = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    w2, b1 = torch.randn(6, 5, device=device), torch.zeros(5, device=device)
    unknown = {"activation": "tanh"}
    return [
        BadInput("w1_shape", (x, w1.t(), None, w2, None), {}, ValueError, ("w1", "[8, 5]")),
        BadInput("w2_shape", (x, w1, None, w2.t(), None), {}, ValueError, ("w2", "5", "[5, 6]")),
        BadInput("w2_rank", (x, w1, None, w2[0], None), {}, ValueError, ("w2", "[5]")),
        BadInput("b1_shape", (x, w1, b1[:2], w2, None), {}, ValueError, ("b1", "[5]", "[2]")),
        BadInput("b2_shape", (x, w1, None, w2, b1), {}, ValueError, ("b2", "[6]", "[5]")),
        BadInput("w2_dtype", (x, w1, None, w2.double(), None), {}, TypeError, ("w2", "float64")),
        BadInput("w2_missing", (x, w1, None, None, None), {}, TypeError, ("w2", "NoneType")),
        BadInput("device", (x, w1, None, w2.to("meta"), None), {}, ValueError, ("w2", "meta")),
        BadInput("scalar", (x[0, 0], w1, None, w2, None), {}, ValueError, ("input", "scalar")),
        BadInput("integers", (x.long(), w1, None, w2, None), {}, TypeError, ("input", "int64")),
        BadInput("activation", (x, w1, None, w2, None), unknown, ValueError, ("'tanh'",)),
        BadInput(
            "recompute", (x, w1, None, w2, None), {"recompute": 1}, TypeError, ("recompute", "int")
        ),
    ]


def _case(
    rows: int,
    features: int,
    hidden: int,
    activation: str = "fast_gelu",
    recompute: bool = False,
    headline: bool = False,
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        new = functools.partial(randn, device=device, dtype=dtype)
        args = (
            new(rows, features),
            new(hidden, features, scale=features**-0.5, key="w1"),
            new(hidden, key="b1"),
            new(features, hidden, scale=hidden**-0.5, key="w2"),
            new(features, key="b2"),
        )
        return Sample("bench", args, {"activation": activation, "recompute": recompute})

    x, w, h = rows * features, features * hidden, rows * hidden
    product = 2 * rows * features * hidden
    suffix = " recompute" if recompute else ""
    return BenchCase(
        label=f"{rows}x{features}->{hidden}->{features} {activation}{suffix}",
        make=make,
        bytes_forward=lambda dtype: (2 * x + 2 * w + h) * dtype.itemsize,
        bytes_backward=lambda dtype: (3 * x + 4 * w + 3 * h) * dtype.itemsize,
        flops_forward=2 * product,
        flops_backward=(5 if recompute else 4) * product,
        headline=headline,
    )


SPEC = Spec(
    name="mlp",
    op=mlp,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(1024, 768, 3072, headline=True),
        _case(1024, 768, 3072, recompute=True),
        _case(2048, 512, 2048, "gelu_tanh"),
        _case(4096, 1024, 4096),
        _case(16, 768, 3072),
    ),
    summary="two linear layers with an activation between",
    autocast="lower",
)
