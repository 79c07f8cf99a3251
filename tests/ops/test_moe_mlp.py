"""What is special about moe_mlp: its parts' bits, what it saves, rows of nobody, blocked sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_close

import fusedops
from fusedops.specs import _routing

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
HALF = [torch.float32, torch.bfloat16]


def _call(
    dtype: torch.dtype,
    routing: tuple[int, int, int] = (50, 3, 5),
    sizes: tuple[int, int, int] = (48, 40, 56),
    *,
    pattern: str = "random",
    gated: bool = True,
    bias: bool = True,
) -> tuple[Any, list[torch.Tensor]]:
    """Return a plan and the leaves input, w1, w2, b1, b2."""
    plan = _routing.plan(*routing, device=CPU, dtype=dtype, pattern=pattern)
    hidden, inner, out = sizes
    width, experts = inner * (1 + gated), routing[2]
    generator = torch.Generator().manual_seed(6)
    shapes = [(routing[0], hidden), (experts, width, hidden), (experts, out, inner)]
    scales = [1.0, hidden**-0.5, inner**-0.5]
    if bias:
        shapes, scales = [*shapes, (experts, width), (experts, out)], [*scales, 0.5, 0.5]
    drawn = [
        (torch.randn(shape, generator=generator) * scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    leaves = [each.mT if each.dim() == 3 else each for each in drawn]
    return plan, [leaf.requires_grad_() for leaf in leaves]


def _run(plan: Any, leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    x, *weights = leaves
    output = fusedops.moe_mlp(x, plan, *weights, **options)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(8)).to(output)
    wanted = [*leaves, plan.probs]
    return [output.detach(), *torch.autograd.grad(output, wanted, grad, allow_unused=True)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_has_the_bits_of_a_batch(dtype: torch.dtype, gated: bool) -> None:
    """Weights of experts that few tokens chose are read where they lie, others are packed."""
    _, leaves = _call(dtype, (400, 2, 4), (400, 72, 70), gated=gated)
    x, *weights = (leaf.detach() for leaf in leaves)
    logits = torch.randn(400, 4, generator=torch.Generator().manual_seed(9))
    whole = fusedops.moe_mlp(x, fusedops.moe_route(logits, 2), *weights, gated=gated)
    for count in (1, 3, 6, 57, 399):
        for first in range(0, min(12, 401 - count), count):
            here = slice(first, first + count)
            part = fusedops.moe_mlp(
                x[here], fusedops.moe_route(logits[here], 2), *weights, gated=gated
            )
            assert torch.equal(part, whole[here]), f"{count} tokens from {first}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_product_and_sum_have_the_bits_of_grouped_mm_and_moe_unpermute(
    dtype: torch.dtype,
) -> None:
    """Without activation or gate the hidden layer is a product whose bits are known."""
    plan, leaves = _call(dtype, gated=False, bias=False, pattern="dropped")
    x, w1, w2 = (leaf.detach() for leaf in leaves)
    ones = plan.with_probs(torch.ones_like(plan.probs))
    rows = fusedops.grouped_mm(fusedops.moe_permute(x, plan), w1, plan.offsets)
    rows = fusedops.grouped_mm(rows, w2, plan.offsets)
    got = fusedops.moe_mlp(x, ones, w1, w2, activation="identity", gated=False)
    assert torch.equal(got, fusedops.moe_unpermute(rows, plan, weighted=False))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gated", [False, True])
def test_recomputed_and_kept_preactivations_give_the_same_bits(
    dtype: torch.dtype, gated: bool
) -> None:
    plan, leaves = _call(dtype, gated=gated)
    options = {"gated": gated, "activation": "gelu"}
    again = _run(plan, leaves, recompute=True, **options)
    kept = _run(plan, leaves, recompute=False, **options)
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_interleaved_weights_give_the_bits_of_halves(dtype: torch.dtype) -> None:
    plan, (x, w1, w2, b1, b2) = _call(dtype)
    order = torch.arange(80).view(2, 40).t().flatten()  # gate 0, up 0, gate 1, ...
    for dense in (False, True):
        mixed = w1[..., order].detach()
        mixed = (mixed.contiguous() if dense else mixed.mT.contiguous().mT).requires_grad_()
        halves = _run(plan, [x, w1, w2, b1, b2], activation="swiglu_oai")
        bias = b1[:, order].detach().requires_grad_()
        pairs = _run(plan, [x, mixed, w2, bias, b2], activation="swiglu_oai", interleaved=True)
        halves[2], halves[4] = halves[2][..., order], halves[4][:, order]
        # The input's gradient is a sum over the columns of w1, whose order differs.
        assert_close(pairs.pop(1), halves[1].double(), halves[1], "gradient of input", depth=80)
        del halves[1]
        assert all(torch.equal(a, b) for a, b in zip(pairs, halves, strict=True))
