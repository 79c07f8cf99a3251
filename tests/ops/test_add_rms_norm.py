"""What is special about add_rms_norm: it equals its parts, what it saves, dtypes, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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
    shapes = [(rows, cols), (rows, cols), (cols,)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [5, 33, 200, 1024])
def test_bits_are_those_of_sum_then_norm(columns: int, dtype: torch.dtype) -> None:
    x, residual, weight = inputs(37, columns, dtype)
    normed, summed = fusedops.add_rms_norm(x, residual, (columns,), weight)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, F.rms_norm(residual + x, (columns,), weight))
    for extras in ({"rounding": "hf"}, {"weight_offset": 1.0}):
        normed, summed = fusedops.add_rms_norm(x, residual, (columns,), weight, 1e-6, **extras)
        want = fusedops.rms_norm(residual + x, (columns,), weight, 1e-6, **extras)
        assert torch.equal(normed, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_that_of_the_seed_on_every_backend(backend: str) -> None:
    for shape in ((5, 33), (3, 128), (2, 9001)):
        x, residual = torch.ones(shape), torch.zeros(shape)
        torch.manual_seed(3)
        keep = philox.keep_mask(shape, philox.new_seed(x.device), 0.3)
        leaves = [x.requires_grad_(), residual.requires_grad_()]
        with fusedops.use_backend(backend):
            torch.manual_seed(3)
            outputs = fusedops.add_rms_norm(*leaves, shape[-1:], dropout_p=0.3)
            grads = torch.autograd.grad(outputs, leaves, [torch.randn(shape) for _ in outputs])
        summed = outputs[1].detach()
        assert torch.equal(summed != 0, keep)
        assert torch.equal(summed[keep], torch.full_like(summed[keep], 1.0 / 0.7))
        torch.testing.assert_close(grads[0], torch.where(keep, grads[1] / 0.7, 0.0))


def test_one_tensor_is_the_gradient_of_both_when_nothing_is_dropped() -> None:
    x, residual, weight = inputs(4, 32)
    outputs = fusedops.add_rms_norm(x, residual, (32,), weight)
    loss = outputs[0].square().sum() + outputs[1].sum()
    grad_x, grad_residual = torch.autograd.grad(loss, (x, residual))
    assert grad_x.data_ptr() == grad_residual.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["normed", "summed"])
def test_either_output_may_go_unused(backend: str, used: str) -> None:
    leaves = inputs(3, 40)
    x, residual, weight = leaves
    upstream = torch.randn(3, 40)
    with fusedops.use_backend(backend):
        normed, summed = fusedops.add_rms_norm(x, residual, (40,), weight)
        output = normed if used == "normed" else summed
        got = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    eager = residual + x
    if used == "normed":
        eager = F.rms_norm(eager, (40,), weight)
    want = torch.autograd.grad(eager, leaves, upstream, allow_unused=True)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)


def test_half_precision_input_joins_a_float32_stream() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(6, 64).to(dtype).requires_grad_()
        residual, weight = torch.randn(6, 64).requires_grad_(), torch.randn(64).requires_grad_()
        outputs = fusedops.add_rms_norm(x, residual, (64,), weight, rounding="hf")
        assert [output.dtype for output in outputs] == [torch.float32, torch.float32]
        assert torch.equal(outputs[1], residual + x)
        loss = outputs[1].sum() + outputs[0].square().sum()
        grad_x, grad_residual = torch.autograd.grad(loss, (x, residual))
        assert grad_x.dtype == dtype
        assert torch.equal(grad_x, grad_residual.to(dtype))


def test_the_input_is_not_saved() -> None:
    x, residual, weight = inputs(8, 32)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _, summed = fusedops.add_rms_norm(x, residual, (32,), weight, dropout_p=0.1)
    whole = [tensor for tensor in saved if tensor.numel() == x.numel()]
    assert [tensor.data_ptr() for tensor in whole] == [summed.data_ptr()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_the_same_mask(use_reentrant: bool) -> None:
    leaves = inputs(9, 48)

    def block(*values: torch.Tensor) -> torch.Tensor:
        x, residual, weight = values
        normed, summed = fusedops.add_rms_norm(x, residual, (48,), weight, dropout_p=0.5)
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
