"""What is special about the experts' rows: order of sums, rows of nobody, layouts, bytes, bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from comparing import assert_same_bits

import fusedops
from fusedops import RoutingPlan, moe_permute, moe_unpermute
from fusedops.ops._moe_payload import dequantize, quantize
from fusedops.specs import _routing
from fusedops.specs.make import randn

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch", TRITON])
by_dtype = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
Tensors = list[torch.Tensor]


def plan_of(
    pattern: str, tokens: int = 13, top_k: int = 4, experts: int = 6, dtype: torch.dtype = F32
) -> RoutingPlan:
    return _routing.plan(tokens, top_k, experts, device=CPU, dtype=dtype, pattern=pattern)


def of_grouped_mm(dtype: torch.dtype, tail: float) -> tuple[Tensors, Tensors]:
    leaves = [
        randn(*shape, device=CPU, dtype=dtype, key=key)
        for key, shape in (("x", (12, 8)), ("weight", (3, 8, 6)), ("bias", (3, 6)))
    ]
    grad = torch.ones(12, 6, dtype=dtype)
    with torch.no_grad():
        leaves[0][8:], grad[8:] = tail, tail
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    y = fusedops.grouped_mm(leaves[0], leaves[1], ends, leaves[2], activation="silu")
    grads = list(torch.autograd.grad(y, leaves, grad))
    return [y, *grads], [y[8:], grads[0][8:], grads[1][1], grads[2][1]]


def of_moe_unpermute(dtype: torch.dtype, tail: float, pattern: str) -> tuple[Tensors, Tensors]:
    plan = plan_of(pattern)
    real, probs = int(plan.offsets[-1]), plan.probs.detach().clone()
    x = randn(52, 24, device=CPU, dtype=dtype)
    with torch.no_grad():
        x[real:], probs[~plan.kept] = tail, tail
    mine = plan.with_probs(probs.requires_grad_())
    y = moe_unpermute(x, mine)
    grads = torch.autograd.grad(y, [x, mine.probs], torch.ones_like(y))
    tokens = torch.ones(13, 24, dtype=dtype, requires_grad=True)
    (of_tokens,) = torch.autograd.grad(moe_permute(tokens, plan), tokens, x.detach())
    return [y, *grads, of_tokens], [grads[0][real:], grads[1][~plan.kept]]


# Results where the rows and weights of nobody have a value, and what of them is 0.
ROWS_OF_NOBODY: dict[str, Callable[..., tuple[Tensors, Tensors]]] = {
    "grouped_mm": of_grouped_mm,
    **{
        f"moe_unpermute, {pattern}": lambda dtype, tail, pattern=pattern: of_moe_unpermute(
            dtype, tail, pattern
        )
        for pattern in ("dropped", "sentinels", "all_dropped")
    },
}


@by_backend
@by_dtype
@pytest.mark.parametrize("label", ROWS_OF_NOBODY)
def test_rows_of_nobody_are_never_read(label: str, dtype: torch.dtype, backend: str) -> None:
    with fusedops.use_backend(backend):
        clean, _ = ROWS_OF_NOBODY[label](dtype, 0.0)
        dirty, zeros = ROWS_OF_NOBODY[label](dtype, math.nan)
    assert not any(each.isnan().any() for each in dirty)
    assert all(map(torch.equal, clean, dirty))
    assert not any(each.any() for each in zeros)


@by_backend
@by_dtype
def test_the_sum_is_in_slot_order_wherever_rows_stand(backend: str, dtype: torch.dtype) -> None:
    """Other labels of the experts, as under expert parallelism, move rows and change nothing."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(6, generator=generator)[:4] for _ in range(50)])
    values = torch.randn(50, 4, 40, generator=generator) * 10.0 ** torch.arange(-3, 5, 2)[:, None]
    values = values.to(dtype)
    probs = torch.rand(50, 4, generator=generator)
    sums = []
    for labels in (range(6), (3, 5, 0, 1, 4, 2), (5, 4, 3, 2, 1, 0)):
        plan = RoutingPlan.from_choices(torch.tensor(labels)[ids], probs, 6)
        rows = values.flatten(0, 1)[plan.permutation]
        with fusedops.use_backend(backend):
            sums.append(moe_unpermute(rows, plan))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@by_dtype
def test_a_token_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    ids, probs = torch.randint(0, 8, (700, 4)), torch.rand(700, 4)
    outputs = torch.randn(700, 4, 72).to(dtype)
    incoming = torch.randn(700, 72).to(dtype)

    def run(tokens: slice) -> tuple[torch.Tensor, ...]:
        weights = probs[tokens].clone().requires_grad_()
        plan = RoutingPlan.from_choices(ids[tokens], weights, 8)
        rows = outputs[tokens].flatten(0, 1)[plan.permutation].requires_grad_()
        y = moe_unpermute(rows, plan)
        grad_rows, grad_probs = torch.autograd.grad(y, [rows, weights], incoming[tokens])
        return y, grad_rows[plan.positions], grad_probs

    whole = run(slice(0, 700))
    for part in (slice(0, 1), slice(5, 12), slice(0, 699)):
        assert_same_bits(run(part), [want[part] for want in whole])


# In steps of one code, ties between codes, subnormal codes, the largest, and what is not finite.
EDGES = [0.0, 448.0, 464.0, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 17.0, 18.0, 19.0, -3.25]


@by_backend
def test_float8_codes_are_those_of_torch(backend: str) -> None:
    """Every scale from the smallest to the largest, around every rounding decision."""
    rows = torch.tensor(EDGES).repeat(9, 1) * 2.0 ** torch.arange(-120, 120, 27).unsqueeze(1)
    rows = torch.cat([rows, torch.zeros(1, len(EDGES)), torch.full((1, len(EDGES)), 1e-45)])
    rows[0, 3], rows[1, 4], rows[2, 5] = torch.inf, torch.nan, -torch.inf
    probs = torch.ones(len(rows), 1)
    with fusedops.use_backend(backend):
        payload = fusedops.moe_pack(rows, probs, quantized=True)
        back = fusedops.moe_unpack(payload, probs, rows)
    codes, scales = quantize(rows)
    assert torch.equal(back.nan_to_num(-1.0), dequantize(codes, scales, F32).nan_to_num(-1.0))
    finite = rows.isfinite()
    assert torch.equal(back.isfinite(), finite)
    # Four significant bits: half a unit of the fourth, or half the spacing of subnormal codes.
    bound = torch.maximum(rows.abs() * 2.0**-4, scales * 2.0**-10)
    assert ((back - rows).abs() <= bound)[finite].all()


def experts(
    dtype: torch.dtype,
    tokens: int = 50,
    sizes: tuple[int, int, int] = (48, 40, 56),
    *,
    gated: bool = True,
) -> Tensors:
    """Return input, w1, w2, b1, b2 of five experts."""
    hidden, inner, out = sizes
    width = inner * (1 + gated)
    shapes = ((tokens, hidden), (5, width, hidden), (5, out, inner), (5, width), (5, out))
    scales = (1.0, hidden**-0.5, inner**-0.5, 0.5, 0.5)
    drawn = [
        randn(*shape, device=CPU, dtype=dtype, scale=scale, grad=False)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return [(each.mT if each.dim() == 3 else each).requires_grad_() for each in drawn]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64], ids=str)
def test_a_token_alone_has_the_bits_of_a_batch(dtype: torch.dtype, gated: bool) -> None:
    """Weights of experts that few tokens chose are read where they lie, others are packed."""
    x, *weights = (leaf.detach() for leaf in experts(dtype, 400, (400, 72, 70), gated=gated))
    logits = randn(400, 5, device=CPU, dtype=F32, grad=False)
    whole = fusedops.moe_mlp(x, fusedops.moe_route(logits, 2), *weights, gated=gated)
    for count in (1, 3, 6, 57, 399):
        for first in range(0, min(12, 401 - count), count):
            here = slice(first, first + count)
            plan = fusedops.moe_route(logits[here], 2)
            part = fusedops.moe_mlp(x[here], plan, *weights, gated=gated)
            assert torch.equal(part, whole[here]), f"{count} tokens from {first}"


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64], ids=str)
def test_second_product_and_sum_have_the_bits_of_grouped_mm_and_moe_unpermute(
    dtype: torch.dtype,
) -> None:
    """Without activation or gate the hidden layer is a product whose bits are known."""
    x, w1, w2, *_ = (leaf.detach() for leaf in experts(dtype, gated=False))
    plan = plan_of("dropped", 50, 3, 5)
    ones = plan.with_probs(torch.ones_like(plan.probs))
    rows = fusedops.grouped_mm(moe_permute(x, plan), w1, plan.offsets)
    rows = fusedops.grouped_mm(rows, w2, plan.offsets)
    got = fusedops.moe_mlp(x, ones, w1, w2, activation="identity", gated=False)
    assert torch.equal(got, moe_unpermute(rows, plan, weighted=False))
