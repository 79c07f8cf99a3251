"""What is special about add_layer_norm and add_rms_norm: the bits of their parts, statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close

import fusedops


def inputs(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(rows, cols), (rows, cols), (cols,), (cols,)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [5, 33, 200, 1024])
def test_bits_are_those_of_sum_then_norm(columns: int, dtype: torch.dtype) -> None:
    x, residual, weight, bias = inputs(37, columns, dtype)
    shape, whole = (columns,), residual + x
    normed, summed = fusedops.add_layer_norm(x, residual, shape, weight, bias)
    assert torch.equal(summed, whole)
    assert torch.equal(normed, fusedops.layer_norm(whole, shape, weight, bias))
    normed, summed = fusedops.add_rms_norm(x, residual, shape, weight)
    assert torch.equal(summed, whole)
    assert torch.equal(normed, F.rms_norm(whole, shape, weight))
    for extras in ({"rounding": "hf"}, {"weight_offset": 1.0}):
        normed, summed = fusedops.add_rms_norm(x, residual, shape, weight, 1e-6, **extras)
        assert torch.equal(normed, fusedops.rms_norm(whole, shape, weight, 1e-6, **extras))


@pytest.mark.parametrize("op", [fusedops.add_layer_norm, fusedops.add_rms_norm])
def test_one_tensor_is_the_gradient_of_both_when_nothing_is_dropped(op) -> None:  # type: ignore[no-untyped-def]
    x, residual, weight, _ = inputs(4, 32)

    def loss() -> torch.Tensor:
        normed, summed = op(x, residual, (32,), weight)
        return normed.square().sum() + summed.sum()

    grad_x, grad_residual = torch.autograd.grad(loss(), (x, residual))
    assert grad_x.data_ptr() == grad_residual.data_ptr()
    loss().backward()
    assert x.grad is not None and torch.equal(x.grad, grad_x)
    x.grad.zero_()  # an accumulated gradient is nobody else's
    assert torch.equal(residual.grad, grad_residual)


def test_a_large_mean_keeps_its_statistics() -> None:
    x, residual = torch.randn(4, 1024), torch.full((4, 1024), 1e4)
    normed, summed = fusedops.add_layer_norm(x, residual, (1024,))
    want = F.layer_norm(summed.double(), (1024,))
    assert_close(normed, want, F.layer_norm(summed, (1024,)), "normed")


@pytest.mark.parametrize("beginning", [1e4, -300.0, 30.0, 1.0])
@pytest.mark.parametrize("cols", [1024, 70, 5])
def test_a_row_that_begins_far_from_its_mean_keeps_its_statistics(
    beginning: float, cols: int
) -> None:
    residual = torch.randn(4, cols)
    residual[:, : min(64, cols // 4)] += beginning
    normed, summed = fusedops.add_layer_norm(torch.randn(4, cols), residual, (cols,))
    want = F.layer_norm(summed.double(), (cols,))
    assert_close(normed, want, F.layer_norm(summed, (cols,)), "normed")
    assert torch.equal(normed, fusedops.layer_norm(summed, (cols,)))


@pytest.mark.parametrize("shift", [0.0, 100.0], ids=["pivot", "two_passes"])
@pytest.mark.parametrize("added", [False, True])
def test_a_row_of_a_million_elements_is_as_exact_as_torchs(added: bool, shift: float) -> None:
    size = (1 << 20) + 5
    x = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    x[:, 64:] += shift  # far from the mean of the row's beginning

    def ours(row: torch.Tensor) -> torch.Tensor:
        if added:
            return fusedops.add_layer_norm(row, torch.zeros_like(row), (size,))[0]
        return fusedops.layer_norm(row, (size,))

    got, exact, eager = ours(x), F.layer_norm(x.double(), (size,)), F.layer_norm(x, (size,))
    assert_close(got, exact, eager, "normed")
