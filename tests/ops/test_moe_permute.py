"""What only moe_permute and moe_unpermute promise: what is read, saved, summed in which order."""

from __future__ import annotations

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
