"""What is special about scaled_masked_softmax: rows without a key, torch's conventions, masks."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_close

import fusedops

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["keep", "additive", "per_row", "input"])
def test_a_row_without_keys_gives_zeros(kind: str, dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(2, 5, 37).to(dtype)
    keep = torch.rand(5, 37) > 0.3
    keep[:, 0] = True
    keep[3] = False
    if kind == "per_row":
        keep = keep[:, :1].clone()
    mask = keep
    if kind == "additive":
        mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -torch.inf)
        mask.requires_grad_()
    if kind == "input":
        x, mask = x.masked_fill(~keep, -torch.inf), None
    x.requires_grad_()
    leaves = [x] if mask is None or not mask.requires_grad else [x, mask]
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x, mask)
        grads = torch.autograd.grad(y, leaves, torch.randn_like(y))
    empty = torch.zeros_like(y[:, 3])
    assert torch.equal(y[:, 3], empty) and torch.equal(grads[0][:, 3], empty)
    assert all(grad.isfinite().all() for grad in (y, *grads))
    total = y.detach().double().sum(-1)
    exact = torch.ones_like(total)
    exact[:, 3] = 0.0
    spread = exact * (1 + torch.finfo(dtype).eps)
    assert_close(total.to(dtype), exact, spread.to(dtype), "sums of rows", depth=37)


@by_backend
def test_the_least_finite_number_is_no_mask(backend: str) -> None:
    x = torch.randn(1, 2, 8).bfloat16()
    mask = torch.zeros(2, 8, dtype=torch.bfloat16)
    mask[0] = torch.finfo(torch.bfloat16).min
    mask[1, 4:] = torch.finfo(torch.bfloat16).min
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x, mask)
    assert torch.equal(y[0, 0], torch.full_like(y[0, 0], 1 / 8))
    assert not y[0, 1, 4:].any()


@by_backend
@pytest.mark.parametrize("kind", ["keep", "additive"])
@pytest.mark.parametrize("columns", [19, 1], ids=["per_column", "per_row"])
def test_an_expanded_mask_gives_the_bits_of_a_dense_one(
    kind: str, columns: int, backend: str
) -> None:
    x = torch.randn(2, 3, 6, 19)
    mask = torch.randn(2, 1, 6, columns)
    mask = mask > -0.5 if kind == "keep" else mask
    results = []
    for given in (mask, mask.expand(2, 3, 6, 19), mask.expand(2, 3, 6, 19).contiguous()):
        leaf = x.clone().requires_grad_()
        given = given.detach().requires_grad_(kind == "additive")
        with fusedops.use_backend(backend):
            y = fusedops.scaled_masked_softmax(leaf, given, 0.7)
            leaves = [leaf, given] if given.requires_grad else [leaf]
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y) + x)
        assert grads[-1].shape == leaves[-1].shape
        results.append((y, grads[0]))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_the_mask_is_never_expanded_in_memory() -> None:
    x, mask = torch.randn(64, 16, 32), torch.zeros(16, 1, dtype=torch.bool)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fusedops.scaled_masked_softmax(x, mask.expand(64, 16, 32))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated == x.numel() * x.element_size()
