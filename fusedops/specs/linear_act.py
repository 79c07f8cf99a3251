"""What tests, benchmarks and documentation need to know of ``linear_act``."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.linear_act import linear_act
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "fast_gelu",
) -> torch.Tensor:
    return ACTIVATIONS[activation](F.linear(input, weight, bias))


def _call(
    new: TensorFactory,
    name: str,
    rows: tuple[int, ...],
    in_features: int,
    out_features: int,
    activation: str = "fast_gelu",
    bias: bool = True,
    transposed: bool = False,
) -> Sample:
    shape = (in_features, out_features) if transposed else (out_features, in_features)
    weight = new(*shape, scale=max(in_features, 1) ** -0.5, key="w")
    if transposed:
        weight = weight.detach().t().requires_grad_()
    args = (new(*rows, in_features), weight, new(out_features, key="b") if bias else None)
    return Sample(name, args, {"activation": activation})


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_call, new)
    activations = [call(name, (7,), 33, 18, name, bias=name != "silu") for name in ACTIVATIONS]
    plain = new(17, 12, scale=0.25, key="w")
    extremes = new(5, 12), plain, with_extremes(new(17, key="b"))
    conv1d = new(12, 17, scale=0.25, key="w").detach().t().requires_grad_()
    return [
        Sample("default", (new(5, 12), plain, new(17, key="b"))),
        *activations,
        *(Sample(f"extremes_{name}", extremes, {"activation": name}) for name in ACTIVATIONS),
        Sample("conv1d_weight", (new(5, 12), conv1d, new(17, key="b"))),
        Sample("frozen", (new(2, 3, 12), plain.detach(), extremes[2]), {"activation": "identity"}),
        call("three_dims", (2, 3), 20, 9, "gelu"),
        call("one_row", (), 40, 11, "gelu_tanh"),
        call("one_element", (1,), 1, 1),
        call("odd_sizes", (37,), 101, 67, "silu"),
        call("no_rows", (0,), 8, 5),
        call("no_features", (3,), 0, 5),
        call("no_outputs", (3,), 8, 0),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, weight = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    bias = torch.zeros(5, device=device)
    bad = bad_changes(input=x, weight=weight)
    return [
        bad("weight_shape", "weight", "8", "[8, 5]", weight=weight.t()),
        bad("weight_rank", "weight", "[8]", weight=weight[0]),
        bad("bias_shape", "bias", "[5]", "[4]", bias=bias[:4]),
        bad("scalar", "input", "scalar", input=x[0, 0]),
    ]


def _case(
    rows: int,
    in_features: int,
    out_features: int,
    activation: str = "fast_gelu",
    bias: bool = True,
    transposed: bool = False,
) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        sizes = (rows,), in_features, out_features
        return _call(new, "bench", *sizes, activation, bias, transposed)

    product = rows * in_features * out_features
    x, w, y = rows * in_features, in_features * out_features, rows * out_features
    label = f"{rows}x{in_features}->{out_features} {activation}"
    label += ", no bias" * (not bias) + ", weight [in, out]" * transposed
    elements = (x + w + 2 * y, 2 * x + 2 * w + 2 * y)
    return BenchCase.moving(label, make, elements, (2 * product, 4 * product))


# Linear layers alone, in both layouts of weights.
_PRODUCTS = tuple(
    _case(rows, 768, 3072, "identity", bias, transposed)
    for rows in (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
    for bias, transposed in itertools.product((True, False), repeat=2)
)


def _from_opinfo(
    input: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if args[0].dim() != 2:  # F.linear also takes one output without a dimension
        return None
    return (input, *args), {**kwargs, "activation": "identity"}


SPEC = describe(linear_act, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1024, 768, 3072).headlined(),
        _case(4096, 768, 3072),
        _case(2048, 3072, 768, "identity"),
        _case(2048, 1024, 4096, "gelu_tanh"),
        _case(2048, 512, 2048, "gelu"),
        _case(1024, 512, 8192, "identity"),
        *_PRODUCTS,
        _case(16, 768, 3072),
    ),
    summary="linear layer and activation in one product",
    autocast="lower",
    opinfo=("nn.functional.linear",),
    from_opinfo=_from_opinfo,
    limits=(
        "A single row in float32 has the bits that it has in a batch, at a price: on one Zen 4 "
        "core 0.7 to 0.9 of the better of eager and oneDNN at 768 -> 3072 without activation, 0.4 "
        "where the weight is in L2, 0.6 at 3072 -> 768. Two to eight rows, and one in bfloat16, "
        "take 0.5 to 0.9 of their time, twelve about the same. `patch` leaves such a row to torch.",
        "Large bare products in float32 run at 0.94 to 0.98 of oneDNN on one Zen 4 core (eager, "
        "which is MKL: 1.06 to 1.2 times).",
    ),
)
