"""What is special about linear_cross_entropy: memory, chunks, accumulation, ignored rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.ops.linear_cross_entropy import keeps_logits

BACKENDS = [
    pytest.param("cpp"),
    pytest.param("torch"),
    pytest.param("triton", marks=pytest.mark.interpreter),
]


def inputs(
    rows: int, hidden_size: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, hidden_size).to(dtype).requires_grad_()
    weight = (torch.randn(classes, hidden_size) / 4).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, classes, (rows,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_does_not_depend_on_the_chunks(reduction: str) -> None:
    """2048 classes are a block of the sums: chunks of whole blocks give the same bits."""
    hidden, weight, target = inputs(5, 8, 9000)
    losses = [
        fusedops.linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_size=size)
        for size in (None, 2048, 6144, 10000)
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_a_rows_gradient_does_not_depend_on_its_batch() -> None:
    hidden, weight, target = inputs(40, 24, 5000, torch.bfloat16)

    def gradient(rows: slice) -> torch.Tensor:
        part = hidden.detach()[rows].requires_grad_()
        loss = fusedops.linear_cross_entropy(part, weight, target[rows], reduction="sum")
        return torch.autograd.grad(loss, part)[0]

    whole = gradient(slice(None))
    for rows in (slice(0, 1), slice(3, 20), slice(17, 40)):
        assert torch.equal(gradient(rows), whole[rows])


class LargestTensor(TorchDispatchMode):
    """Remembers the largest output of any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize(
    ("rows", "kept"), [(4096, True), (4097, False)], ids=["512 MiB", "a row more"]
)
def test_on_the_cpu_logits_are_kept_up_to_a_bound(rows: int, kept: bool) -> None:
    given: dict[str, Any] = {"device": "cpu", "requires_grad": True}
    with FakeTensorMode():  # nothing is allocated
        hidden, weight = torch.empty(rows, 8, **given), torch.empty(32768, 8, **given)
        assert keeps_logits(None, hidden, weight, None) is kept
        assert not keeps_logits(True, hidden, weight, None)
        assert not keeps_logits(None, hidden.detach(), weight.detach(), None)


@pytest.mark.interpreter
def test_no_operator_of_the_triton_backend_makes_whole_logits() -> None:
    hidden, weight, target = inputs(30, 4, 700)
    with fusedops.use_backend("triton"), LargestTensor() as seen:
        loss = fusedops.linear_cross_entropy(hidden, weight, target, chunk_size=64, recompute=True)
        torch.autograd.grad(loss, (hidden, weight))
    assert seen.numel <= max(30 * 64, weight.numel())


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_accumulates_in_float32(backend: str) -> None:
    """Over many chunks and rows the error stays that of one rounding, where bfloat16 sums drift."""
    hidden, weight, target = inputs(48, 16, 300, torch.bfloat16)
    with fusedops.use_backend(backend):
        loss = fusedops.linear_cross_entropy(hidden, weight, target, reduction="sum", chunk_size=20)
        grads = torch.autograd.grad(loss, (hidden, weight))
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target, reduction="sum"), wide)
    for grad, exact in zip(grads, truth, strict=True):
        error = (grad.double() - exact).norm() / exact.norm()
        assert error < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ignored_row_may_hold_anything(backend: str) -> None:
    hidden, weight, target = inputs(4, 6, 9)
    with torch.no_grad():
        hidden[1] = float("nan")
    target[1] = -100
    with fusedops.use_backend(backend):
        loss = fusedops.linear_cross_entropy(hidden, weight, target)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isfinite()
    assert torch.equal(grad_hidden[1], torch.zeros(6)) and grad_hidden.isfinite().all()
    if backend != "triton":  # which multiplies a gradient of 0 by what the row holds
        assert grad_weight.isfinite().all()


def test_all_rows_ignored_is_nan_as_torchs_and_no_gradient() -> None:
    hidden, weight, _ = inputs(3, 6, 9)
    loss = fusedops.linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isnan()
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_of_the_classes_divides_by_all_of_them(backend: str) -> None:
    """What a rank of ``vocab_parallel_cross_entropy`` calls: of 40 classes it has 17."""
    hidden, weight, target = inputs(6, 5, 17)
    target[1], target[2] = -1, -2  # a class of another rank, and a row that is ignored
    options = (-2, 0.3, 0.0, 0.0, "none", 16, False, 40)
    incoming = torch.randn(6)
    tensors = hidden.detach(), weight.detach()
    with fusedops.use_backend(backend):
        loss, _, statistics, logits = torch.ops.fusedops.linear_cross_entropy(
            *tensors, target, None, *options
        )
        grads = torch.ops.fusedops.linear_cross_entropy_backward(
            incoming, *tensors, target, None, statistics, logits, *options, [True, True, False]
        )

    def eager(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        h, w = (tensor.to(dtype) for tensor in tensors)
        shifted = h @ w.T - (h @ w.T).amax(-1, keepdim=True)
        hit = F.one_hot(target.clamp(min=0), 17) * (target >= 0).unsqueeze(-1)
        losses = shifted.logsumexp(-1) - (shifted * (0.7 * hit + 0.3 / 40)).sum(-1)
        grad_logits = incoming.to(dtype).unsqueeze(-1) * (
            shifted.softmax(-1) - 0.7 * hit - 0.3 / 40
        )
        ignored = (target == -2).unsqueeze(-1)
        grad_logits = grad_logits.masked_fill(ignored, 0.0)
        return losses.masked_fill(target == -2, 0.0), grad_logits @ w, grad_logits.T @ h

    for i, (got, *expected) in enumerate(
        zip((loss, *grads[:2]), eager(torch.float64), eager(torch.float32), strict=True)
    ):
        assert_close(got, *expected, f"result {i}", depth=17)
