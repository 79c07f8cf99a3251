"""What is special about add_layer_norm: it equals its parts, what it saves, dtypes, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_testing import assert_close
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops._core import philox

BACKENDS = [
    pytest.param("cpp"),
    pytest.param("torch"),
    pytest.param("triton", marks=pytest.mark.interpreter),
]


def inputs(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(rows, cols), (rows, cols), (cols,), (cols,)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_is_that_of_sum_then_layer_norm(dtype: torch.dtype) -> None:
    x, residual, weight, bias = inputs(37, 200, dtype)
    normed, summed = fusedops.add_layer_norm(x, residual, (200,), weight, bias)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, fusedops.layer_norm(residual + x, (200,), weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_that_of_bias_dropout_add_on_every_backend(backend: str) -> None:
    for shape in ((5, 33), (3, 128), (2, 9001)):
        x, zero = torch.ones(shape), torch.zeros(shape)
        torch.manual_seed(3)
        keep = philox.keep_mask(shape, philox.new_seed(x.device), 0.3)
        with fusedops.use_backend(backend):
            torch.manual_seed(3)
            _, summed = fusedops.add_layer_norm(x, zero, shape[-1:], dropout_p=0.3)
        assert torch.equal(summed != 0, keep)
        assert torch.equal(summed[keep], torch.full_like(summed[keep], 1.0 / 0.7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_drops_what_forward_dropped(backend: str) -> None:
    for cols in (33, 128, 9001):
        x, residual, weight, bias = inputs(3, cols)
        with fusedops.use_backend(backend):
            torch.manual_seed(3)
            outputs = fusedops.add_layer_norm(x, residual, (cols,), weight, bias, dropout_p=0.4)
            grads = [torch.randn_like(output) for output in outputs]
            grad_x, grad_residual = torch.autograd.grad(outputs, (x, residual), grads)
        torch.manual_seed(3)
        keep = philox.keep_mask(x.shape, philox.new_seed(x.device), 0.4)
        torch.testing.assert_close(grad_x, torch.where(keep, grad_residual / 0.6, 0.0))


def test_one_tensor_is_the_gradient_of_both_when_nothing_is_dropped() -> None:
    x, residual, weight, bias = inputs(4, 32)
    outputs = fusedops.add_layer_norm(x, residual, (32,), weight, bias)
    loss = outputs[0].square().sum() + outputs[1].sum()
    grad_x, grad_residual = torch.autograd.grad(loss, (x, residual))
    assert grad_x.data_ptr() == grad_residual.data_ptr()
    x.grad = residual.grad = None
    normed, summed = fusedops.add_layer_norm(x, residual, (32,), weight, bias)
    (normed.square().sum() + summed.sum()).backward()
    assert torch.equal(x.grad, grad_x)
    x.grad.zero_()  # an accumulated gradient is nobody else's
    assert torch.equal(residual.grad, grad_residual)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["normed", "summed"])
def test_either_output_may_go_unused(backend: str, used: str) -> None:
    leaves = inputs(3, 40)
    x, residual, weight, bias = leaves
    upstream = torch.randn(3, 40)
    with fusedops.use_backend(backend):
        normed, summed = fusedops.add_layer_norm(x, residual, (40,), weight, bias)
        output = normed if used == "normed" else summed
        got = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    eager = residual + x
    if used == "normed":
        eager = F.layer_norm(eager, (40,), weight, bias)
    want = torch.autograd.grad(eager, leaves, upstream, allow_unused=True)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_joins_a_float32_stream_without_a_copy(dtype: torch.dtype) -> None:
    x = torch.randn(6, 64).to(dtype).requires_grad_()
    residual, weight, bias = (
        torch.randn(shape).requires_grad_() for shape in ((6, 64), (64,), (64,))
    )
    outputs = fusedops.add_layer_norm(x, residual, (64,), weight, bias)
    assert [output.dtype for output in outputs] == [torch.float32, torch.float32]
    assert torch.equal(outputs[1], residual + x)
    grad_x, grad_residual = torch.autograd.grad(outputs[1].sum() + outputs[0].sum(), (x, residual))
    assert grad_x.dtype == dtype
    assert torch.equal(grad_x, grad_residual.to(dtype))


def test_float16_input_joins_a_float32_stream() -> None:
    x = torch.randn(6, 64).half().requires_grad_()
    residual = torch.randn(6, 64, requires_grad=True)
    normed, summed = fusedops.add_layer_norm(x, residual, (64,), dropout_p=0.2)
    normed.square().sum().backward()
    assert summed.dtype == torch.float32
    assert x.grad.dtype == torch.float16 and residual.grad.dtype == torch.float32
    assert torch.equal(x.grad != 0, (summed != residual).detach() & (residual.grad.half() != 0))


def test_the_input_is_not_saved() -> None:
    x, residual, weight, bias = inputs(8, 32)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _, summed = fusedops.add_layer_norm(x, residual, (32,), weight, bias, dropout_p=0.1)
    whole = [tensor for tensor in saved if tensor.numel() == x.numel()]
    assert [tensor.data_ptr() for tensor in whole] == [summed.data_ptr()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_the_same_mask(use_reentrant: bool) -> None:
    leaves = inputs(9, 48)

    def block(*values: torch.Tensor) -> torch.Tensor:
        x, residual, weight, bias = values
        normed, summed = fusedops.add_layer_norm(x, residual, (48,), weight, bias, dropout_p=0.5)
        return normed * summed

    torch.manual_seed(5)
    plain = block(*leaves)
    want = torch.autograd.grad(plain.sum(), leaves)
    torch.manual_seed(5)
    again = checkpoint(block, *leaves, use_reentrant=use_reentrant)
    again.sum().backward()
    assert torch.equal(again, plain)
    for leaf, grad in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, grad)


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
