"""What is special about scaled_masked_softmax: rows without a key, torch's conventions, masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_testing import assert_close

import fusedops
from fusedops.specs import all_specs

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
SPEC = all_specs()["scaled_masked_softmax"]


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
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4)])
def test_causality_is_that_of_sdpa(queries: int, keys: int, backend: str) -> None:
    query, key = torch.randn(2, queries, 8), torch.randn(2, keys, 8)
    eye = torch.eye(keys).expand(2, -1, -1)
    want = F.scaled_dot_product_attention(query, key, eye, is_causal=True)
    wide = (tensor.double() for tensor in (query, key, eye))
    exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    with fusedops.use_backend(backend):
        got = fusedops.scaled_masked_softmax(query @ key.mT, None, 8**-0.5, True)
    assert_close(got, exact, want, "probabilities", depth=8)


@by_backend
def test_a_boolean_mask_is_that_of_sdpa(backend: str) -> None:
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    keep = torch.rand(2, 1, 5, 7) > 0.4
    keep[..., 0] = True
    eye = torch.eye(7).expand(2, 3, -1, -1)
    want = F.scaled_dot_product_attention(query, key, eye, keep)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), eye.double(), keep)
    with fusedops.use_backend(backend):
        got = fusedops.scaled_masked_softmax(query @ key.mT, keep, 8**-0.5)
    assert_close(got, exact, want, "probabilities", depth=8)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (19,), (6, 19), (6, 1), (1, 19), (3, 1, 19), (3, 6, 1), (2, 1, 6, 19), (2, 3, 1, 1)],
)
def test_any_broadcast_of_an_additive_mask(
    shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    x = torch.randn(2, 3, 6, 19).to(dtype).requires_grad_()
    mask = torch.randn(shape).requires_grad_()  # float32 beside half precision too
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, mask)]
    dy = torch.randn(2, 3, 6, 19).to(dtype)
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x, mask, 0.5)
        grads = torch.autograd.grad(y, (x, mask), dy)
    exact = SPEC.eager(*wide, 0.5)
    exact_grads = torch.autograd.grad(exact, wide, dy.double())
    # Eager in the dtype of the data: as here, its backward has the rounded probabilities.
    eager = torch.softmax(x * 0.5 + mask.to(dtype), -1)
    eager_grads = torch.autograd.grad(eager, (x, mask), dy)
    assert grads[1].shape == mask.shape and grads[1].dtype == torch.float32
    assert_close(y, exact, eager, "result")
    assert_close(grads[0], exact_grads[0], eager_grads[0], "gradient of input", 19)
    assert_close(grads[1], exact_grads[1], eager_grads[1], "gradient of mask", x.numel())


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


@by_backend
def test_scores_far_from_zero_stay_exact(backend: str) -> None:
    x = torch.randn(4, 50)
    with fusedops.use_backend(backend):
        got = fusedops.scaled_masked_softmax(x + 1024.0)
    exact = torch.softmax((x + 1024.0).double(), -1)
    assert_close(got, exact, torch.softmax(x + 1024.0, -1), "shifted")


@by_backend
def test_nan_stays_in_its_row(backend: str) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = float("nan")
    with fusedops.use_backend(backend):
        y = fusedops.scaled_masked_softmax(x)
    assert y.isnan().all(-1).tolist() == [False, True, False]
    assert not y[::2].isnan().any()


@pytest.mark.parametrize("shape", [(9,), (4, 1, 9), (4, 3, 9), (1, 1)])
def test_thread_count_does_not_change_the_gradient_of_a_mask(shape: tuple[int, ...]) -> None:
    x = torch.randn(500, 4, 3, 9, requires_grad=True)
    mask = torch.randn(shape, requires_grad=True)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = fusedops.scaled_masked_softmax(x, mask)
            results.append(torch.autograd.grad(y, (x, mask), torch.ones_like(y) + x.detach()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_outputs_are_the_same_bits_as_small_ones(is_causal: bool) -> None:
    """Above 16 MiB the kernels write around the cache."""
    x = torch.randn(33, 512, 512).bfloat16().requires_grad_()
    y = fusedops.scaled_masked_softmax(x, None, 0.5, is_causal)
    grad = torch.autograd.grad(y, x, torch.ones_like(y) + x.detach())[0]
    for part in (slice(0, 5), slice(28, 33)):
        some = x.detach()[part].requires_grad_()
        small = fusedops.scaled_masked_softmax(some, None, 0.5, is_causal)
        assert torch.equal(small, y[part])
        ones = torch.ones_like(small) + some.detach()
        assert torch.equal(torch.autograd.grad(small, some, ones)[0], grad[part])


def test_the_mask_is_never_expanded_in_memory() -> None:
    x, mask = torch.randn(64, 16, 32), torch.zeros(16, 1, dtype=torch.bool)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fusedops.scaled_masked_softmax(x, mask.expand(64, 16, 32))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert allocated == x.numel() * x.element_size()
