"""What is special about baddbmm: factors, NaN under beta = 0, sums over broadcast dims, layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_testing import assert_close
from test_linear_act import saved_bytes

import fusedops


def test_beta_zero_ignores_nan_as_torch_does() -> None:
    input, a, b = torch.full((2, 3, 5), float("nan")), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    leaves = [each.requires_grad_() for each in (input, a, b)]
    output = fusedops.baddbmm(*leaves, beta=0)
    assert torch.allclose(output, torch.matmul(a, b))
    grads = torch.autograd.grad(output.sum(), leaves)
    assert torch.equal(grads[0], torch.zeros(2, 3, 5))
    assert all(grad.isfinite().all() for grad in grads)


def test_saves_the_two_factors_only() -> None:
    input, a, b = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with saved_bytes(a, b) as found:
        fusedops.baddbmm(input.requires_grad_(), a, b)
    assert found == []


def test_gradient_of_an_addend_like_the_result_is_not_copied() -> None:
    input = torch.randn(2, 3, 5, requires_grad=True)
    output = fusedops.baddbmm(input, torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    incoming = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, input, incoming)
    assert grad.data_ptr() == incoming.data_ptr()


def test_gradient_of_transposed_keys_has_their_layout() -> None:
    keys = torch.randn(2, 3, 7, 4, requires_grad=True)
    output = fusedops.baddbmm(torch.randn(7), torch.randn(2, 3, 5, 4), keys.mT)
    (grad,) = torch.autograd.grad(output.square().sum(), keys)
    assert grad.is_contiguous()


# Shapes whose gradient takes every way of csrc/cpu/product/baddbmm.isa.cpp: the innermost dimension
# summed or kept, longer than a piece, in parts or not, everything summed.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(), (1, 1, 130), (1, 65, 1), (3, 1, 1), (3, 65, 130), (1, 65, 130), (3, 1, 130), (3, 65, 1)],
)
def test_addend_gradients_match_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    a, b, grad = (torch.randn(each).to(dtype) for each in ((3, 65, 9), (3, 9, 130), (3, 65, 130)))
    input = torch.randn(shape).to(dtype)

    def run(wide: torch.dtype, fused: bool) -> torch.Tensor:
        leaf = input.to(wide).requires_grad_()
        function = fusedops.baddbmm if fused else torch.baddbmm
        output = function(leaf, a.to(wide), b.to(wide), beta=0.5)
        return torch.autograd.grad(output, leaf, grad.to(wide))[0]

    exact, eager = run(torch.float64, fused=False), run(dtype, fused=False)
    assert_close(run(dtype, fused=True), exact, eager, f"{shape}", depth=grad.numel())


@pytest.mark.parametrize("rows", [1, 3000])
def test_long_rows_are_summed_in_pieces(rows: int) -> None:
    grad = torch.randn(2, rows, 5000, generator=torch.Generator().manual_seed(1))
    for shape in ((5000,), (rows, 1), ()):
        input = torch.zeros(shape, requires_grad=True)
        output = fusedops.baddbmm(input, torch.zeros(2, rows, 1), torch.zeros(2, 1, 5000))
        (got,) = torch.autograd.grad(output, input, grad)
        assert_close(
            got, grad.double().sum_to_size(shape), grad.sum_to_size(shape), f"{shape}", grad.numel()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    input, a, b = (torch.randn(s).to(dtype) for s in ((7, 1, 70), (7, 130, 60), (7, 60, 70)))
    whole = fusedops.baddbmm(input, a, b, alpha=0.5)
    for index in range(7):
        part = fusedops.baddbmm(input[index], a[index], b[index], alpha=0.5)
        assert torch.equal(part, whole[index])
        row = fusedops.baddbmm(input[index], a[index, 3:4], b[index], alpha=0.5)
        assert torch.equal(row, whole[index, 3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (5, 31, 17), (14, 32, 32), (1, 3, 1)])
def test_small_matrices_have_the_bits_of_blocks(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """A product of one tile is not packed; as rows and columns of a larger one it is."""
    rows, depth, columns = sizes
    addend, a = torch.randn(2, 60, 90).to(dtype), torch.randn(2, 60, depth).to(dtype)
    for b in (torch.randn(2, depth, 90), torch.randn(2, 90, depth).mT):
        b = b.to(dtype)
        whole = fusedops.baddbmm(addend, a, b, beta=0.5)[:, :rows, :columns]
        part = fusedops.baddbmm(addend[:, :rows, :columns], a[:, :rows], b[..., :columns], beta=0.5)
        assert torch.equal(part, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    shapes = ((3, 1, 130), (2, 3, 200, 64), (3, 64, 130))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            output = fusedops.baddbmm(*leaves, alpha=0.125)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_offsets_past_2_to_the_31_elements() -> None:
    far = 2**31 + 64
    memory = torch.empty(far + 12, dtype=torch.bfloat16)
    apart = memory.as_strided((2, 3, 4), (far, 4, 1))
    apart.copy_(torch.randn(2, 3, 4))
    b, input = torch.randn(2, 4, 5).bfloat16(), torch.randn(5).bfloat16()
    want = fusedops.baddbmm(input, apart.contiguous(), b)
    assert torch.equal(fusedops.baddbmm(input, apart, b), want)


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("far", ["batch2", "addend"])
def test_columns_may_lie_2_to_the_31_elements_away(far: str, backend: str) -> None:
    """Each is fewer elements from the next than 32 bits count, as in a large transposed matrix."""
    stride = 2**30 + 64
    # Of numpy: torch may be told to fill what it leaves uninitialised, here gigabytes.
    memory = torch.from_numpy(np.empty(2 * stride + 4, dtype=np.int16)).view(torch.bfloat16)
    a, b, input = (torch.randn(shape).bfloat16() for shape in ((1, 2, 4), (1, 4, 3), (2, 3)))
    shape, strides = ((1, 4, 3), (4, 1, stride)) if far == "batch2" else ((2, 3), (1, stride))
    apart = memory.as_strided(shape, strides).copy_(b if far == "batch2" else input)
    batch2, addend = (apart, input) if far == "batch2" else (b, apart)
    with fusedops.use_backend(backend):
        want = fusedops.baddbmm(input, a, b)
        assert torch.equal(fusedops.baddbmm(addend, a, batch2), want)


@pytest.mark.interpreter
def test_launches_of_a_part_of_the_batch_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.kernels import baddbmm

    monkeypatch.setattr(baddbmm, "_LAUNCH", 4)
    a, b, input = torch.randn(2, 5, 2, 3), torch.randn(5, 3, 4), torch.randn(2, 1, 2, 4)
    with fusedops.use_backend("triton"):
        output = fusedops.baddbmm(input, a, b)
    want = torch.matmul(a.double(), b.double()) + input
    assert_close(output, want, torch.matmul(a, b) + input, "output", depth=4)
