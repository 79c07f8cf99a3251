"""What is special about linear_act, linear_glu, mlp and baddbmm: products, layouts, factors."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::matmul", "aten::linear", "aten::bmm"}


@pytest.mark.parametrize(("name", "weights"), [("linear_act", 1), ("linear_glu", 2)])
def test_backward_makes_preactivations_that_were_not_kept(name: str, weights: int) -> None:
    x, grad = torch.randn(6, 8), torch.ones(6, 10)
    given = [x, *(torch.randn(10, 8) for _ in range(weights))]
    given += [torch.randn(10)] * (name == "linear_act")
    op, backward = (getattr(torch.ops.fusedops, each) for each in (name, f"{name}_backward"))
    results = []
    for keep in (True, False):
        _, *kept = op(*given, "gelu", keep)
        results.append(backward(grad, *given, *kept, "gelu", keep, [True] * 3))
    for with_kept, without in zip(*results, strict=True):
        assert torch.equal(with_kept, without)


def test_gradient_of_a_transposed_weight_has_its_layout() -> None:
    """GPT-2's Conv1D keeps [in, out]: its gradient must not be copied when it is accumulated."""
    stored = torch.randn(8, 10, requires_grad=True)
    (grad,) = torch.autograd.grad(
        fusedops.linear_act(torch.randn(6, 8), stored.t(), activation="silu").sum(), stored
    )
    assert grad.is_contiguous()
    keys = torch.randn(2, 3, 7, 4, requires_grad=True)
    output = fusedops.baddbmm(torch.randn(7), torch.randn(2, 3, 5, 4), keys.mT)
    (grad,) = torch.autograd.grad(output.square().sum(), keys)
    assert grad.is_contiguous()


class CountProducts(TorchDispatchMode):
    """Counts torch's matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func._schema.name in _PRODUCTS
        return func(*args, **(kwargs or {}))


def _mlp_leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((9, 16), (32, 16), (32,), (12, 32), (12,))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("recompute", "products"), [(False, 6), (True, 7)])
def test_number_of_matrix_products(recompute: bool, products: int) -> None:
    """On the reference, whose products are torch's: 8 would be a checkpoint around the block."""
    from fusedops.ops.mlp import _backward, _reference

    leaves = [leaf.detach() for leaf in _mlp_leaves()]
    with torch.no_grad(), CountProducts() as counted:
        output, kept = _reference(*leaves, "gelu", not recompute)
        grad = torch.ones_like(output)
        _backward(grad, *leaves, kept, "gelu", not recompute, [True] * 5)
    assert counted.count == products


def test_recompute_gives_the_same_bits() -> None:
    results = []
    for recompute in (False, True):
        leaves = _mlp_leaves()
        output = fusedops.mlp(*leaves, activation="gelu_tanh", recompute=recompute)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocks_of_rows_do_not_show() -> None:
    """The forward makes the hidden layer some thousand rows at a time (16 MiB)."""
    x = torch.randn(2500, 8, dtype=torch.float64)
    w1, w2 = torch.randn(1500, 8, dtype=torch.float64), torch.randn(6, 1500, dtype=torch.float64)
    whole = fusedops.mlp(x, w1, None, w2, None)
    assert torch.equal(whole[-3:], fusedops.mlp(x[-3:], w1, None, w2, None))


def test_beta_zero_ignores_nan_as_torch_does() -> None:
    input, a, b = torch.full((2, 3, 5), float("nan")), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    leaves = [each.requires_grad_() for each in (input, a, b)]
    output = fusedops.baddbmm(*leaves, beta=0)
    assert torch.allclose(output, torch.matmul(a, b))
    grads = torch.autograd.grad(output.sum(), leaves)
    assert torch.equal(grads[0], torch.zeros(2, 3, 5))
    assert all(grad.isfinite().all() for grad in grads)


def test_gradient_of_an_addend_like_the_result_is_not_copied() -> None:
    input = torch.randn(2, 3, 5, requires_grad=True)
    output = fusedops.baddbmm(input, torch.randn(2, 3, 4), torch.randn(2, 4, 5))
    incoming = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, input, incoming)
    assert grad.data_ptr() == incoming.data_ptr()


@pytest.mark.interpreter
def test_launches_of_a_part_of_the_batch_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.kernels import baddbmm

    monkeypatch.setattr(baddbmm, "_LAUNCH", 4)
    a, b, input = torch.randn(2, 5, 2, 3), torch.randn(5, 3, 4), torch.randn(2, 1, 2, 4)
    with fusedops.use_backend("triton"):
        output = fusedops.baddbmm(input, a, b)
    want = torch.matmul(a.double(), b.double()) + input
    assert_close(output, want, torch.matmul(a, b) + input, "output", depth=4)
