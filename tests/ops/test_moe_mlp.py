"""What is special about moe_mlp: its parts' bits, what it saves, rows of nobody, blocked sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_testing import assert_close
from test_linear_act import saved_bytes
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.ops._moe_gate import hidden_of
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


@pytest.mark.parametrize("pattern", ["random", "dropped", "one_expert", "empty_experts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_has_the_bits_of_its_parts(dtype: torch.dtype, pattern: str) -> None:
    """Permute, grouped_mm, gate, grouped_mm, unpermute: fusing them changes nothing."""
    plan, leaves = _call(dtype, pattern=pattern, bias=False)
    x, w1, w2 = (leaf.detach() for leaf in leaves)
    rows = fusedops.moe_permute(x, plan)
    hidden = fusedops.grouped_mm(rows, w1, plan.offsets)
    # The kernel's gate acts on the unrounded sums: exact here are the sums of a float64 product.
    wide = fusedops.grouped_mm(rows.double(), w1.double(), plan.offsets)
    probs = plan.probs.detach().flatten()[plan.permutation.long(), None]
    exact = (hidden_of(wide, "silu", True, False) * probs).double()
    parts = (hidden_of(hidden.to(probs.dtype), "silu", True, False) * probs).to(dtype)
    result = fusedops.moe_unpermute(
        fusedops.grouped_mm(parts, w2, plan.offsets), plan, weighted=False
    )
    got = fusedops.moe_mlp(x, plan, w1, w2)
    truth = fusedops.moe_unpermute(
        fusedops.grouped_mm(exact, w2.double(), plan.offsets), plan, weighted=False
    )
    assert_close(got, truth, result, "output", depth=48)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_has_the_bits_of_a_batch(dtype: torch.dtype, gated: bool) -> None:
    """Weights of experts that few tokens chose are read where they lie, others are packed."""
    _, leaves = _call(dtype, (400, 2, 4), (400, 72, 70), gated=gated)
    x, *weights = (leaf.detach() for leaf in leaves)
    logits = torch.randn(400, 4, generator=torch.Generator().manual_seed(9))
    whole = fusedops.moe_mlp(x, fusedops.moe_route(logits, 2), *weights, gated=gated)
    for count in (1, 3, 6):
        for first in range(0, 12, count):
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


def test_saves_the_input_the_plan_and_if_told_the_preactivation() -> None:
    plan, leaves = _call(torch.float32)
    x, *weights = leaves
    known = [*leaves, *torch.utils._pytree.tree_leaves(plan)]
    with saved_bytes(*known) as found:
        fusedops.moe_mlp(x, plan, *weights)
    assert sum(found) == 0
    with saved_bytes(*known) as found:
        fusedops.moe_mlp(x, plan, *weights, recompute=False)
    assert [size for size in found if size] == [50 * 3 * 80 * 4]


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


@pytest.mark.parametrize("dtype", HALF)
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    plan, leaves = _call(dtype, (301, 2, 7), (200, 130, 90), pattern="dropped")
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(_run(plan, leaves))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    plan, leaves = _call(dtype, (300, 2, 5), (80, 70, 60))
    x, *weights = (leaf.detach() for leaf in leaves)
    whole = fusedops.moe_mlp(x, plan, *weights)
    for count in (1, 2, 57, 299):
        part = fusedops.RoutingPlan.from_choices(
            plan.expert_ids[:count].long(), plan.probs[:count].detach(), 5
        )
        assert torch.equal(fusedops.moe_mlp(x[:count], part, *weights), whole[:count])


# Both sides of the blocking decisions of the batch in csrc/cpu/gemm/gemm.isa.cpp.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("routing", "sizes"),
    [((300, 2, 4), (800, 70, 65)), ((60, 2, 3), (30, 12400, 20)), ((40, 1, 3), (12400, 30, 20))],
)
def test_blocked_sizes_match_float64(
    dtype: torch.dtype, routing: tuple[int, int, int], sizes: tuple[int, int, int]
) -> None:
    plan, leaves = _call(dtype, routing, sizes)

    def run(wide: torch.dtype, backend: str) -> list[torch.Tensor]:
        cast = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
        probs = plan.probs.detach().to(torch.float64 if wide == torch.float64 else torch.float32)
        with fusedops.use_backend(backend):
            return _run(plan.with_probs(probs.requires_grad_()), cast)

    exact, eager = run(torch.float64, "torch"), run(dtype, "torch")
    for index, got in enumerate(run(dtype, "cpp")):
        terms = 2 * max(sizes)
        assert_close(got, exact[index], eager[index], f"result {index}", depth=terms)


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients_add_to_buffers(
    backend: str, recompute: bool, dtype: torch.dtype, transposed: bool
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no Triton kernel takes float64")
    routing = (30, 2, 3) if backend == "triton" else (70, 3, 5)
    plan, leaves = _call(dtype, routing, pattern="empty_experts")
    _, w1, w2, *_ = leaves
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = [torch.full(each.shape, 0.5, dtype=wide) for each in (w1, w2)]
    into = [(each.mT.contiguous().mT if transposed else each.clone()) for each in before]
    options = {"recompute": recompute}
    with fusedops.use_backend(backend):
        plain = _run(plan, leaves, **options)
        *added, probs = _run(plan, leaves, grad_weights_into=tuple(into), **options)
    with fusedops.use_backend("torch"):
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        probabilities = plan.probs.detach().double().requires_grad_()
        exact = _run(plan.with_probs(probabilities), doubles)
    assert added[2] is None and added[3] is None, "a weight whose gradient is added gets none"
    same = [*(added[i] for i in (0, 1, 4, 5)), probs], [plain[i] for i in (0, 1, 4, 5, 6)]
    assert all(torch.equal(got, want) for got, want in zip(*same, strict=True))
    empty = plan.tokens_per_expert.tolist().index(0)
    for got, start, truth, base in zip(into, before, exact[2:4], plain[2:4], strict=True):
        assert torch.equal(got[empty], start[empty]), "an expert without tokens adds nothing"
        rounded = (base.to(wide) + start).to(dtype)
        assert_close(got.to(dtype), start.double() + truth, rounded, "buffer", depth=210)


def test_buffers_work_in_compiled_code_and_under_autocast() -> None:
    plan, leaves = _call(torch.float32)
    x, *parameters = leaves
    pairs = [[torch.zeros(parameter.shape) for parameter in parameters[:2]] for _ in range(4)]

    def loss(into: list[torch.Tensor], x: torch.Tensor = x, parameters: Any = parameters) -> Any:
        output = fusedops.moe_mlp(x, plan, *parameters, grad_weights_into=(into[0], into[1]))
        return output.float().square().sum()

    grads = torch.autograd.grad(loss(pairs[0]), [x, *parameters[2:]])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(pairs[1]), [x, *parameters[2:]])
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*pairs[:2], strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        loss(pairs[2]).backward()
    halves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    loss(pairs[3], halves[0], halves[1:]).backward()
    assert all(torch.equal(a, b) for a, b in zip(*pairs[2:], strict=True))


def test_checkpoint_keeps_the_experts_that_the_forward_chose() -> None:
    """The plan is an argument: a recomputation that would route differently cannot."""
    plan, leaves = _call(torch.float32)
    x, *weights = leaves
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return fusedops.moe_mlp(x + 0.0 * len(calls), plan, *weights).square().sum()

    straight = torch.autograd.grad(block(x), leaves)
    recomputed = torch.autograd.grad(checkpoint(block, x, use_reentrant=False), leaves)
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(straight, recomputed, strict=True))
