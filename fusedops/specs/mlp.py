"""What tests, benchmarks and documentation need to know of ``mlp``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.mlp import mlp
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str = "fast_gelu",
    recompute: bool = False,
    tile_tokens: int | None = None,
) -> torch.Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(input, w1, b1)), w2, b2)


def _call(
    new: TensorFactory,
    name: str,
    rows: tuple[int, ...],
    sizes: tuple[int, int, int],
    activation: str = "fast_gelu",
    biases: tuple[bool, bool] = (True, True),
    recompute: bool = False,
    tile_tokens: int | None = None,
) -> Sample:
    in_features, hidden, out = sizes
    args = (
        new(*rows, in_features),
        new(hidden, in_features, scale=max(in_features, 1) ** -0.5, key="w1"),
        new(hidden, key="b1") if biases[0] else None,
        new(out, hidden, scale=max(hidden, 1) ** -0.5, key="w2"),
        new(out, key="b2") if biases[1] else None,
    )
    options = {"activation": activation, "recompute": recompute, "tile_tokens": tile_tokens}
    return Sample(name, args, options)


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_call, new)
    conv1d = [
        new(*shape, scale=0.25, key=f"{shape}").detach().t().requires_grad_()
        for shape in ((9, 21), (21, 10))
    ]
    rows, first, bias, *second = call("rows", (7,), (12, 19, 10)).args
    extremes = rows, first, with_extremes(bias), *second
    return [
        call("rows", (7,), (12, 19, 10)),
        *(Sample(f"extremes_{name}", extremes, {"activation": name}) for name in ("gelu", "silu")),
        call("recompute", (7,), (12, 19, 10), "gelu", recompute=True),
        *(call(name, (5,), (11, 18, 9), name) for name in ("identity", "relu", "relu2", "silu")),
        call("no_biases", (6,), (11, 18, 9), "gelu_tanh", (False, False)),
        call("first_bias", (2, 3), (11, 18, 9), "gelu", (True, False), recompute=True),
        call("second_bias", (2, 3), (11, 18, 9), "gelu", (False, True)),
        Sample("conv1d_weights", (new(5, 9), conv1d[0], new(21, key="b"), conv1d[1], None)),
        call("tiles", (2, 7), (12, 19, 10), "gelu", tile_tokens=4),
        call("tiles_relu", (6,), (11, 18, 9), "relu", (False, False), tile_tokens=3),
        Sample("tiles_conv1d", (new(5, 9), conv1d[0], None, conv1d[1], None), {"tile_tokens": 2}),
        call("one_row", (), (12, 19, 10)),
        call("odd_sizes", (37,), (65, 101, 43)),
        call("no_rows", (0,), (12, 19, 10)),
        call("no_hidden", (3,), (12, 0, 10)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, w1 = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    w2, b1 = torch.randn(6, 5, device=device), torch.zeros(5, device=device)
    bad = bad_changes(input=x, w1=w1, b1=None, w2=w2, b2=None)
    return [
        bad("w1_shape", "w1", "[8, 5]", w1=w1.t()),
        bad("w2_shape", "w2", "5", "[5, 6]", w2=w2.t()),
        bad("w2_rank", "w2", "[5]", w2=w2[0]),
        bad("b1_shape", "b1", "[5]", "[2]", b1=b1[:2]),
        bad("b2_shape", "b2", "[6]", "[5]", b2=b1),
        bad("scalar", "input", "scalar", input=x[0, 0]),
    ]


def _case(
    rows: int, features: int, hidden: int, activation: str = "fast_gelu", recompute: bool = False
) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        sizes = (features, hidden, features)
        return _call(new, "bench", (rows,), sizes, activation, recompute=recompute)

    x, w, h = rows * features, features * hidden, rows * hidden
    product = 2 * rows * features * hidden
    suffix = " recompute" if recompute else ""
    label = f"{rows}x{features}->{hidden}->{features} {activation}{suffix}"
    elements = (2 * x + 2 * w + h, 3 * x + 4 * w + 3 * h)
    flops = (2 * product, (5 if recompute else 4) * product)
    return BenchCase.moving(label, make, elements, flops)


SPEC = describe(mlp, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1024, 768, 3072).headlined(),
        _case(1024, 768, 3072, recompute=True),
        _case(2048, 512, 2048, "gelu_tanh"),
        _case(4096, 1024, 4096),
        _case(16, 768, 3072),
    ),
    summary="two linear layers with an activation between",
    autocast="lower",
)
