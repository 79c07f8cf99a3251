"""What tests, benchmarks and documentation need to know of ``moe_mlp``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops._core.checks import UnsupportedError
from fusedops.ops import RoutingPlan
from fusedops.ops.moe_mlp import moe_mlp
from fusedops.specs import _hf_experts, _routing
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec, bad


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
) -> torch.Tensor:
    """Loop over the experts, as model code does."""
    return _loop(input, plan, w1, w2, b1, b2, activation, gated, interleaved, weigh_hidden=False)


def _weighing_hidden(
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
) -> torch.Tensor:
    """Do the same with the probabilities before the second product, as the kernels do."""
    return _loop(input, plan, w1, w2, b1, b2, activation, gated, interleaved, weigh_hidden=True)


def _loop(
    input: torch.Tensor,
    plan: RoutingPlan,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    *,
    weigh_hidden: bool,
) -> torch.Tensor:
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
    plan: RoutingPlan,
    hidden: int,
    inner: int,
    out: int,
    *,
    gated: bool,
    bias: bool,
    transposed: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    new = functools.partial(randn, device=device, dtype=dtype)
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


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def call(
        name: str,
        routing: tuple[int, int, int] = (16, 2, 3),
        sizes: tuple[int, int, int] = (6, 5, 6),
        activation: str = "silu",
        pattern: str = "random",
        bias: bool = False,
        transposed: bool = False,
        **options: bool,
    ) -> Sample:
        plan = _routing.plan(*routing, device=device, dtype=dtype, pattern=pattern, key=name)
        given = _arguments(
            plan,
            *sizes,
            gated=options.get("gated", True),
            bias=bias,
            transposed=transposed,
            device=device,
            dtype=dtype,
        )
        return Sample(name, given, {"activation": activation, **options})

    patterns = [pattern for pattern in _routing.PATTERNS if pattern != "random"]
    return [
        call("default", (9, 2, 3)),
        call("biases", bias=True, transposed=True),
        call("kept", bias=True, recompute=False),
        *(call(pattern, (8, 2, 4), pattern=pattern, bias=True) for pattern in patterns),
        call("interleaved", bias=True, interleaved=True),
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
    far = torch.full_like(plan.permutation, 99)
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    outside = RoutingPlan(**{**values, "permutation": far})
    less = RoutingPlan(**{**values, "offsets": plan.offsets.flip(0)})

    wide = torch.zeros_like(w1), torch.zeros_like(w2)
    narrow: dict[str, Any] = {"grad_weights_into": (wide[0], wide[1][:2])}
    half: dict[str, Any] = {"grad_weights_into": (wide[0].half(), wide[1])}
    spread: dict[str, Any] = {"grad_weights_into": (wide[0][:, :1].expand_as(w1), wide[1])}
    alone: dict[str, Any] = {"grad_weights_into": wide[0]}
    lacking: dict[str, Any] = {"grad_weights_into": (wide[0], None)}
    name = "grad_weights_into"
    return [
        bad("tokens", x[:3], plan, w1, w2, mentions=("input", "4", "[3, 8]")),
        bad("no_plan", x, None, w1, w2, mentions=("plan", "NoneType"), error=TypeError),
        bad("w1_experts", x, plan, w1[:2], w2, mentions=("w1", "[3, 8,", "[2, 8, 10]")),
        bad("w1_odd", x, plan, w1[..., :9], w2, mentions=("w1", "2 * inner", "[3, 8, 9]")),
        bad("w1_rank", x, plan, w1[0], w2, mentions=("w1", "[8, 10]")),
        bad("w2_inner", x, plan, w1, w2, mentions=("w2", "10", "[3, 5, 6]"), gated=False),
        bad("w2_dtype", x, plan, w1, w2.double(), mentions=("w2", "float64"), error=TypeError),
        bad("b1_shape", x, plan, w1, w2, b1[:2], mentions=("b1", "[3, 10]", "[2, 10]")),
        bad("b2_shape", x, plan, w1, w2, None, b1, mentions=("b2", "[3, 6]", "[3, 10]")),
        bad("device", x, plan, w1.to("meta"), w2, mentions=("w1", "meta")),
        bad("integers", x.long(), plan, w1, w2, mentions=("input", "int64"), error=TypeError),
        bad("activation", x, plan, w1, w2, mentions=("'tanh'",), activation="tanh"),
        bad("oai_plain", x, plan, w1, w1, mentions=("oai",), activation="swiglu_oai", gated=False),
        bad("gated", x, plan, w1, w2, mentions=("gated", "int"), error=TypeError, gated=1),
        bad("permutation", x, outside, w1, w2, mentions=("plan.permutation", "99")),
        bad("offsets", x, less, w1, w2, mentions=("offsets", "decreas")),
        bad("into_one", x, plan, w1, w2, mentions=(name, "pair"), error=TypeError, **alone),
        bad("into_none", x, plan, w1, w2, mentions=(name, "[1]"), error=TypeError, **lacking),
        bad("into_dtype", x, plan, w1, w2, mentions=(name, "float16"), error=TypeError, **half),
        bad("into_shape", x, plan, w1, w2, mentions=(name, "[2, 5, 6]"), **narrow),
        bad("into_strides", x, plan, w1, w2, mentions=(name, "dense"), **spread),
    ]


def _case(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    recompute: bool = False,
    headline: bool = False,
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        plan = _routing.plan(tokens, top_k, experts, device=device, dtype=dtype)
        given = _arguments(
            plan,
            hidden,
            inner,
            hidden,
            gated=True,
            bias=False,
            transposed=True,
            device=device,
            dtype=dtype,
        )
        return Sample("bench", given, {"recompute": recompute})

    rows, weights = tokens * top_k, experts * 3 * hidden * inner
    product = 2 * rows * hidden * inner
    suffix = ", recompute" if recompute else ""
    return BenchCase(
        label=f"{tokens}x{hidden}, top {top_k} of {experts}, inner {inner}{suffix}",
        make=make,
        bytes_forward=lambda dtype: (2 * tokens * hidden + weights) * dtype.itemsize,
        bytes_backward=lambda dtype: (3 * tokens * hidden + 2 * weights) * dtype.itemsize,
        flops_forward=3 * product,
        flops_backward=(8 if recompute else 6) * product,
        headline=headline,
    )


def _peers() -> dict[str, Callable[..., Any]]:
    def of(experts: _hf_experts.Experts) -> Callable[..., torch.Tensor]:
        def peer(
            input: torch.Tensor,
            plan: RoutingPlan,
            w1: torch.Tensor,
            w2: torch.Tensor,
            b1: torch.Tensor | None = None,
            b2: torch.Tensor | None = None,
            **options: Any,
        ) -> torch.Tensor:
            if b1 is not None or b2 is not None:
                raise UnsupportedError("the peer has no biases")
            weights = plan.probs.to(input.dtype)
            return experts(input, plan.expert_ids.long(), weights, w1.mT, w2.mT)

        return peer

    peers = {name: of(experts) for name, experts in _hf_experts.installed().items()}
    return {"dense_einsum": _dense_einsum, **peers}


def _dense_einsum(
    input: torch.Tensor,
    plan: RoutingPlan,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run every token through every expert and keep what the router chose."""
    weights = input.new_zeros(input.shape[0], plan.num_experts)
    weights = weights.scatter(1, plan.expert_ids.long(), plan.probs.to(input.dtype))
    gate, up = torch.einsum("th,ehi->eti", input, w1).chunk(2, dim=2)
    outputs = torch.einsum("eti,eih->eth", F.silu(gate) * up, w2)
    return torch.einsum("eth,te->th", outputs, weights)


SPEC = Spec(
    name="moe_mlp",
    op=moe_mlp,
    eager=_eager,
    non_finite=(_eager, _weighing_hidden),
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(2048, 2, 8, 1024, 2048, headline=True),
        _case(1024, 8, 64, 1024, 512, headline=True),
        _case(2048, 2, 8, 1024, 2048, recompute=True),
        _case(1024, 8, 64, 1024, 512, recompute=True),
        _case(2048, 2, 64, 1024, 512),
        _case(1024, 8, 16, 1024, 1024),
        _case(4, 8, 64, 1024, 512),
        _case(100, 2, 8, 128, 96),
    ),
    summary="the experts of a mixture-of-experts layer",
    autocast="lower",
    peers=_peers,
    rows_are_independent=False,
    # The gradient of a probability is float32: sum_c d[c] * h(z[c]) of unrounded d, but of z as it
    # is saved (or recomputed, with the same bits). Each term is off by up to eps / 2 * |z h'(z)|
    # of each of gate and up, so that terms of one sign give the sum an error of eps of the low
    # dtype. Eager torch rounds z too, and more after it: over 200 draws its error was 1.5 to 1.9
    # times ours (median of root mean squares), but the largest of as few as 10 numbers may by
    # chance be small, which the budget, twice that one, takes for precision in 1 to 12 of 200.
    rounds_inside=True,
)
