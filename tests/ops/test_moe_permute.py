"""What only moe_permute and moe_unpermute promise: what is read, saved, summed in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedops
from fusedops import RoutingPlan, moe_permute, moe_unpermute
from fusedops.specs import _routing

CPU = torch.device("cpu")
NAN = float("nan")
BACKENDS = pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
PATTERNS = pytest.mark.parametrize("pattern", _routing.PATTERNS)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)


def make(pattern: str, tokens: int = 13, top_k: int = 4, experts: int = 6) -> RoutingPlan:
    return _routing.plan(tokens, top_k, experts, device=CPU, dtype=torch.float32, pattern=pattern)


@BACKENDS
@PATTERNS
def test_each_expert_finds_its_tokens_in_order_and_the_tail_is_zero(
    backend: str, pattern: str
) -> None:
    plan = make(pattern)
    x = torch.arange(1.0, 14.0).unsqueeze(1).expand(13, 8)
    with fusedops.use_backend(backend):
        rows = moe_permute(x, plan)
    ids = torch.where(plan.kept, plan.expert_ids, -1)
    begin = 0
    for expert, end in enumerate(plan.offsets.tolist()):
        tokens = (ids == expert).nonzero()[:, 0] + 1.0
        assert torch.equal(rows[begin:end], tokens.unsqueeze(1).expand(-1, 8))
        begin = end
    assert (rows[begin:] == 0).all()


@BACKENDS
@DTYPES
@pytest.mark.parametrize("pattern", ["dropped", "sentinels", "all_dropped"])
def test_rows_behind_the_last_offset_are_never_read(
    backend: str, dtype: torch.dtype, pattern: str
) -> None:
    plan = make(pattern)
    real = int(plan.offsets[-1])
    rows = torch.randn(52, 24).to(dtype)
    weights = plan.probs.detach().clone()
    weights[~plan.kept] = NAN
    results = []
    for tail, probs in ((0.0, plan.probs.detach()), (NAN, weights)):
        mine = plan.with_probs(probs.clone().requires_grad_())
        x = rows.clone()
        x[real:] = tail
        x.requires_grad_()
        with fusedops.use_backend(backend):
            y = moe_unpermute(x, mine)
            grads = torch.autograd.grad(y, [x, mine.probs], torch.ones_like(y))
            token = torch.ones(13, 24, dtype=dtype, requires_grad=True)
            (grad_token,) = torch.autograd.grad(moe_permute(token, plan), token, x.detach())
        results.append((y, *grads, grad_token))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and not dirty.isnan().any()
    assert (results[0][1][real:] == 0).all() and (results[0][2][~plan.kept] == 0).all()


@BACKENDS
@DTYPES
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
    one_by_one = torch.zeros(50, 40, dtype=torch.float64)
    fused = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    for j in range(4):
        product = probs[:, j, None].double() * values[:, j].double()
        if not fused:
            product = product.float().double()
        one_by_one = (one_by_one + product).float().double()  # a fused multiply-add rounds once
    if backend == "cpp":
        assert torch.equal(sums[0], one_by_one.to(dtype))


@DTYPES
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
        for got, want in zip(run(part), whole, strict=True):
            assert torch.equal(got, want[part])


def _saved_bytes(function: Any) -> int:
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(seen.values())


def test_rows_are_saved_only_for_the_gradient_of_probabilities() -> None:
    plan = make("random")
    frozen = plan.with_probs(plan.probs.detach())
    rows = torch.randn(52, 64, requires_grad=True)
    indices = plan.positions.nbytes + plan.offsets.nbytes
    assert _saved_bytes(lambda: moe_unpermute(rows, plan, weighted=False)) == indices
    assert _saved_bytes(lambda: moe_unpermute(rows, frozen)) == indices + plan.probs.nbytes
    whole = indices + plan.probs.nbytes + rows.nbytes
    assert _saved_bytes(lambda: moe_unpermute(rows, plan)) == whole
    tokens = torch.randn(13, 64, requires_grad=True)
    assert _saved_bytes(lambda: moe_permute(tokens, plan)) == indices


def test_rows_2_to_the_31_elements_apart() -> None:
    far, memory = 2**31 + 64, torch.empty(2**31 + 128, dtype=torch.bfloat16)
    apart = memory.as_strided((2, 64), (far, 1)).copy_(torch.randn(2, 64))
    plan = make("random", tokens=2, top_k=1, experts=2)
    assert torch.equal(moe_permute(apart, plan), moe_permute(apart.contiguous(), plan))
    results = []
    for rows in (apart, apart.contiguous()):
        leaf = rows.detach().requires_grad_()
        y = moe_unpermute(leaf, plan)
        results.append((y, *torch.autograd.grad(y, [leaf, plan.probs], apart)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@BACKENDS
def test_permute_and_unpermute_are_each_others_inverse(backend: str) -> None:
    plan, x = make("random"), torch.randn(13, 40)
    with fusedops.use_backend(backend):
        back = moe_unpermute(moe_permute(x, plan), plan, weighted=False)
    assert torch.equal(back, x + x + x + x)


def test_probabilities_of_another_dtype_are_widened() -> None:
    plan, rows = make("random"), torch.randn(52, 8, dtype=torch.float64)
    assert plan.probs.dtype == torch.float32
    want = moe_unpermute(rows, plan.with_probs(plan.probs.double()))
    assert torch.equal(moe_unpermute(rows, plan), want) and want.dtype == torch.float64
