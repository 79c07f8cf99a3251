"""What tests, benchmarks and documentation need to know of ``moe_mlp``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops import RoutingPlan
from fusedops.ops.moe_mlp import moe_mlp
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _hidden(z: torch.Tensor, activation: str, gated: bool, interleaved: bool) -> torch.Tensor:
    if not gated:
        return ACTIVATIONS[activation](z)
    gate, up = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    return ACTIVATIONS[activation](gate) * up


def _eager(
    input: torch.Tensor,
    plan: RoutingPlan,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    recompute: bool = True,
    weigh_hidden: bool = False,
) -> torch.Tensor:
    """Loop over the experts, as model code does.

    With ``weigh_hidden`` the probabilities come before the second product, as in the kernels.
    """
    slots, probs = plan.permutation.long(), plan.probs.flatten()
    output = probs.new_zeros(input.shape[0], w2.shape[2])
    rounded, begin = input.dtype, 0
    for expert, end in enumerate(plan.offsets.tolist()):
        chosen = slots[begin:end]
        begin, tokens = end, chosen // plan.top_k if plan.top_k else chosen
        z = F.linear(input[tokens], w1[expert].t(), None if b1 is None else b1[expert])
        h = _hidden(z, activation, gated, interleaved)
        weights = probs[chosen, None]
        if weigh_hidden:
            y = F.linear((h * weights).to(h.dtype), w2[expert].t())
            y = y if b2 is None else y + (b2[expert] * weights).to(y.dtype)
            output = output.index_add(0, tokens, y.to(output.dtype))
            continue
        y = F.linear(h, w2[expert].t(), None if b2 is None else b2[expert])
        rounded = y.dtype
        output = output.index_add(0, tokens, (y * weights).to(output.dtype))
    return output.to(rounded)


def _arguments(
    new: TensorFactory,
    plan: RoutingPlan,
    sizes: tuple[int, int, int],
    *,
    gated: bool = True,
    bias: bool = False,
    transposed: bool = False,
) -> tuple[Any, ...]:
    hidden, inner, out = sizes
    width, experts = inner * (1 + gated), plan.num_experts

    def weight(rows: int, columns: int, key: str) -> torch.Tensor:
        scale = max(rows, 1) ** -0.5
        if not transposed:
            return new(experts, rows, columns, scale=scale, key=key)
        return new(experts, columns, rows, scale=scale, key=key).detach().mT.requires_grad_()

    return (
        new(plan.num_tokens, hidden),
        plan,
        weight(hidden, width, "w1"),
        weight(inner, out, "w2"),
        new(experts, width, scale=0.5, key="b1") if bias else None,
        new(experts, out, scale=0.5, key="b2") if bias else None,
    )


def _samples(new: TensorFactory) -> list[Sample]:
    def call(
        name: str,
        routing: tuple[int, int, int] = (16, 2, 3),
        sizes: tuple[int, int, int] = (6, 5, 6),
        activation: str = "silu",
        pattern: str = "random",
        bias: bool = False,
        transposed: bool = False,
        gated: bool = True,
        extremes: bool = False,
        **options: bool,
    ) -> Sample:
        plan = _routing.plan(*routing, **new.place, pattern=pattern, key=name)
        args = _arguments(new, plan, sizes, gated=gated, bias=bias, transposed=transposed)
        if extremes:
            gate, up = args[4].detach().chunk(2, -1)
            bias1 = torch.cat((with_extremes(gate), up), -1).requires_grad_()
            args = (*args[:4], bias1, args[5])
        return Sample(name, args, {"activation": activation, "gated": gated, **options})

    patterns = [pattern for pattern in _routing.PATTERNS if pattern != "random"]
    return [
        call("default", (9, 2, 3)),
        call("biases", bias=True, transposed=True),
        call("kept", bias=True, recompute=False),
        *(call(pattern, (8, 2, 4), pattern=pattern, bias=True) for pattern in patterns),
        call("interleaved", bias=True, interleaved=True),
        call("extremes", (9, 2, 3), (6, 8, 5), bias=True, extremes=True),
        call("gpt_oss", (6, 2, 3), (6, 19, 5), "swiglu_oai", bias=True, interleaved=True),
        call("oai_halves", activation="swiglu_oai", transposed=True),
        call("plain", activation="gelu", bias=True, gated=False),
        *(call(name, (5, 1, 2), activation=name) for name in ("relu", "gelu_tanh", "identity")),
        call("relu2_plain", (5, 3, 4), activation="relu2", gated=False, recompute=False),
        call("fast_gelu", (4, 3, 3), (5, 4, 7), "fast_gelu", interleaved=True, recompute=False),
        call("odd_sizes", (37, 2, 5), (37, 37, 41), transposed=True),
        call("many_experts", (11, 8, 37), (5, 3, 4)),
        call("one_element", (1, 1, 1), (1, 1, 1)),
        call("no_tokens", (0, 2, 3), bias=True),
        call("no_inner", sizes=(6, 0, 4), bias=True),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    plan = _routing.plan(4, 2, 3, device=device, dtype=torch.float32, grad=False)
    x, w1 = torch.randn(4, 8, device=device), torch.randn(3, 8, 10, device=device)
    w2, b1 = torch.randn(3, 5, 6, device=device), torch.zeros(3, 10, device=device)
    outside = dataclasses.replace(plan, permutation=torch.full_like(plan.permutation, 99))
    less = dataclasses.replace(plan, offsets=plan.offsets.flip(0))

    into1, into2, into = torch.zeros_like(w1), torch.zeros_like(w2), "grad_weights_into"
    spread, halves = into1[:, :1].expand_as(w1), (into1.half(), into2)
    bad = bad_changes(input=x, plan=plan, w1=w1, w2=w2)
    return [
        bad("tokens", "input", "4", "[3, 8]", input=x[:3]),
        bad("w1_experts", "w1", "[3, 8,", "[2, 8, 10]", w1=w1[:2]),
        bad("w1_odd", "w1", "2 * inner", "[3, 8, 9]", w1=w1[..., :9]),
        bad("w1_rank", "w1", "[8, 10]", w1=w1[0]),
        bad("w2_inner", "w2", "10", "[3, 5, 6]", gated=False),
        bad("b1_shape", "b1", "[3, 10]", "[2, 10]", b1=b1[:2]),
        bad("b2_shape", "b2", "[3, 6]", "[3, 10]", b1=None, b2=b1),
        bad("oai_plain", "oai", w2=w1, activation="swiglu_oai", gated=False),
        bad("permutation", "plan.permutation", "99", plan=outside),
        bad("offsets", "offsets", "decreas", plan=less),
        bad("into_one", into, "pair", error=TypeError, grad_weights_into=into1),
        bad("into_none", into, "[1]", error=TypeError, grad_weights_into=(into1, None)),
        bad("into_dtype", into, "float16", error=TypeError, grad_weights_into=halves),
        bad("into_shape", into, "[2, 5, 6]", grad_weights_into=(into1, into2[:2])),
        bad("into_strides", into, "dense", grad_weights_into=(spread, into2)),
    ]


def _case(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, recompute: bool = False
) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        plan = _routing.plan(tokens, top_k, experts, **new.place)
        args = _arguments(new, plan, (hidden, inner, hidden), transposed=True)
        return Sample("bench", args, {"recompute": recompute})

    rows, weights = tokens * top_k, experts * 3 * hidden * inner
    product = 2 * rows * hidden * inner
    suffix = ", recompute" if recompute else ""
    label = f"{tokens}x{hidden}, top {top_k} of {experts}, inner {inner}{suffix}"
    elements = (2 * tokens * hidden + weights, 3 * tokens * hidden + 2 * weights)
    flops = (3 * product, (8 if recompute else 6) * product)
    return BenchCase.moving(label, make, elements, flops)


SPEC = describe(moe_mlp, _eager, _samples, _bad_inputs, _case)(
    non_finite=(_eager, functools.partial(_eager, weigh_hidden=True)),
    bench_cases=(
        _case(2048, 2, 8, 1024, 2048).headlined(),
        _case(1024, 8, 64, 1024, 512).headlined(),
        _case(2048, 2, 8, 1024, 2048, recompute=True),
        _case(1024, 8, 64, 1024, 512, recompute=True),
        _case(2048, 2, 64, 1024, 512),
        _case(1024, 8, 16, 1024, 1024),
        _case(4, 8, 64, 1024, 512),
        _case(100, 2, 8, 128, 96),
    ),
    summary="the experts of a mixture-of-experts layer",
    autocast="lower",
    rows_are_independent=False,
    # The gradient of a probability is float32: sum_c d[c] * h(z[c]) of unrounded d, but of z as it
    # is saved (or recomputed, with the same bits). Each term is off by up to eps / 2 * |z h'(z)|
    # of each of gate and up, so that terms of one sign give the sum an error of eps of the low
    # dtype. Eager torch rounds z too, and more after it: over 200 draws its error was 1.5 to 1.9
    # times ours (median of root mean squares), but the largest of as few as 10 numbers may by
    # chance be small, which the budget, twice that one, takes for precision in 1 to 12 of 200.
    rounds_inside=True,
)
