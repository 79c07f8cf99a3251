"""What is special about mlp: how many matrix products it makes, and what it saves."""

from __future__ import annotations

import pytest
import torch
from test_linear_act import saved_bytes
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::matmul", "aten::linear", "aten::bmm"}


class CountProducts(TorchDispatchMode):
    """Counts torch's matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func._schema.name in _PRODUCTS
        return func(*args, **(kwargs or {}))


def _leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((9, 16), (32, 16), (32,), (12, 32), (12,))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("recompute", "products"), [(False, 6), (True, 7)])
def test_number_of_matrix_products(recompute: bool, products: int) -> None:
    """On the reference, whose products are torch's: 8 would be a checkpoint around the block."""
    from fusedops.ops.mlp import _backward_reference, _reference

    x, w1, b1, w2, b2 = (leaf.detach() for leaf in _leaves())
    with torch.no_grad(), CountProducts() as counted:
        output, kept = _reference(x, w1, b1, w2, b2, "gelu", not recompute)
        grad = torch.ones_like(output)
        _backward_reference(
            grad, x, w1, b1, w2, b2, kept, "gelu", not recompute, [True, True, True, True, True]
        )
    assert counted.count == products


@pytest.mark.parametrize("recompute", [False, True])
def test_saves_one_hidden_tensor_or_none(recompute: bool) -> None:
    leaves = _leaves()
    with saved_bytes(*leaves) as found:
        fusedops.mlp(*leaves, recompute=recompute)
    assert found == ([] if recompute else [9 * 32 * 4])


def test_recompute_gives_the_same_bits() -> None:
    results = []
    for recompute in (False, True):
        leaves = _leaves()
        output = fusedops.mlp(*leaves, activation="gelu_tanh", recompute=recompute)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_gradient_alone_equals_that_of_all() -> None:
    leaves = _leaves()
    whole = torch.autograd.grad(fusedops.mlp(*leaves).square().sum(), leaves)
    for index, leaf in enumerate(leaves):
        (alone,) = torch.autograd.grad(fusedops.mlp(*leaves).square().sum(), leaf)
        assert torch.equal(alone, whole[index])


def test_blocks_of_rows_do_not_show() -> None:
    """The forward makes the hidden layer some thousand rows at a time (16 MiB)."""
    x = torch.randn(2500, 8, dtype=torch.float64)
    w1, w2 = torch.randn(1500, 8, dtype=torch.float64), torch.randn(6, 1500, dtype=torch.float64)
    whole = fusedops.mlp(x, w1, None, w2, None)
    assert torch.equal(whole[-3:], fusedops.mlp(x[-3:], w1, None, w2, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    shapes = ((201, 60), (130, 60), (130,), (50, 130), (50,))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            output = fusedops.mlp(*leaves, activation="gelu", recompute=True)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
