"""What is special about losses: torch's edge cases, ignored rows, masked classes, chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import moe_route, moe_router_loss

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
of_both = pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])


def inputs(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, scale: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets."""
    logits = (torch.randn(rows, classes) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(0, classes, (rows,))


def linear_inputs(
    rows: int, hidden_size: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, a weight and targets."""
    hidden, target = inputs(rows, hidden_size, dtype, 1.0)
    weight, _ = inputs(classes, hidden_size, dtype, 0.25)
    return hidden, weight, target % classes


def call(name: str, rows: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """Return a loss as a function of targets and options, and its leaves: first that of rows."""
    *leaves, _ = inputs(rows, 9) if name == "cross_entropy" else linear_inputs(rows, 6, 9)
    return lambda target, **options: getattr(fusedops, name)(*leaves, target, **options), leaves


def losses_and_gradient(
    loss: Callable[..., torch.Tensor], logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of rows, and the gradient of their sum."""
    losses = loss(logits, target, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@by_backend
@of_both
def test_all_rows_ignored_is_torchs_nan_and_no_gradient(name: str, backend: str) -> None:
    loss, leaves = call(name, 3)
    with fusedops.use_backend(backend):
        mean = loss(torch.full((3,), -100))
        grads = torch.autograd.grad(mean, leaves)
    assert mean.isnan()
    assert not any(grad.any() for grad in grads)


@by_backend
@of_both
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_an_ignored_row_may_hold_anything(name: str, backend: str, garbage: float) -> None:
    loss, leaves = call(name, 4)
    with torch.no_grad():
        leaves[0][2] = garbage
    with fusedops.use_backend(backend):
        losses = loss(torch.tensor([0, 5, -100, 8]), z_loss=0.1, reduction="none")
        grads = torch.autograd.grad(losses.sum(), leaves)
    assert losses[2] == 0 and losses.isfinite().all()
    assert not grads[0][2].any()
    # Triton multiplies the row by a gradient of 0 for that of the weight.
    assert all(grad.isfinite().all() for grad in grads[: 1 if backend == "triton" else 2])


@by_backend
@pytest.mark.parametrize("classes", [9, 5000])
@pytest.mark.parametrize("first", [True, False], ids=["leading", "trailing"])
def test_masked_classes_cost_nothing(backend: str, classes: int, first: bool) -> None:
    """Logits of -inf, as a mask of the vocabulary makes, over whole blocks."""
    logits, target = inputs(3, classes)
    half = slice(0, classes - 4) if first else slice(4, None)
    with torch.no_grad():
        logits[:, half] = -math.inf
    target[:] = classes - 2 if first else 1
    with fusedops.use_backend(backend):
        got = losses_and_gradient(fusedops.cross_entropy, logits, target)
    torch.testing.assert_close(got, losses_and_gradient(F.cross_entropy, logits, target))
    assert not got[1][:, half].any()


@by_backend
@pytest.mark.parametrize("top", [-1000.0, -40.0, 3.0, 20.0, 1000.0])
def test_the_maximum_may_be_anywhere(backend: str, top: float) -> None:
    """The guess of the maximum is proved wrong in the first, a middle and the last block."""
    logits, target = inputs(3, 9001)
    with torch.no_grad():
        logits -= 50.0 if top > 0 else 3000.0
        for row, column in enumerate((5, 4500, 9000)):
            logits[row, column] = top
    with fusedops.use_backend(backend):
        got = losses_and_gradient(fusedops.cross_entropy, logits, target)
    wide = logits.detach().double().requires_grad_()
    exact = losses_and_gradient(F.cross_entropy, wide, target)
    eager = losses_and_gradient(F.cross_entropy, logits, target)
    for name, *tensors in zip(("losses", "gradient"), got, exact, eager, strict=True):
        assert_close(*tensors, name)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", [5.0, 12.0, 18.0, 60.0])
def test_a_sure_prediction_has_a_small_loss_and_never_a_negative_one(
    backend: str, dtype: torch.dtype, margin: float
) -> None:
    logits, target = inputs(64, 4099, dtype, scale=0.1)
    with torch.no_grad():
        logits[torch.arange(64), target] = margin
        with fusedops.use_backend(backend), torch.autocast("cpu", dtype=torch.bfloat16):
            losses = fusedops.cross_entropy(logits, target, reduction="none")
        exact, eager = (
            F.cross_entropy(logits.to(wide), target, reduction="none")
            for wide in (torch.float64, torch.float32)
        )
    assert losses.dtype == torch.float32
    assert_close(losses, exact, eager, "losses")
    assert (losses >= 0).all()


@pytest.mark.interpreter
def test_out_of_range_on_triton_is_nan_in_its_row_only() -> None:
    logits, target = inputs(3, 9)
    target[1] = 9
    with fusedops.use_backend("triton"):
        losses, grad = losses_and_gradient(fusedops.cross_entropy, logits, target)
    assert losses.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(-1).tolist() == [False, True, False]
    assert grad[::2].isfinite().all()


@by_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dtype_gives_the_loss_of_wide_logits_and_their_own_gradient(
    backend: str, reduction: str
) -> None:
    logits, target = inputs(9, 513, torch.bfloat16)
    wide = logits.detach().float().requires_grad_()
    with fusedops.use_backend(backend):
        loss = fusedops.cross_entropy(logits, target, reduction=reduction, dtype=torch.float32)
        want = fusedops.cross_entropy(wide, target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        (want_grad,) = torch.autograd.grad(want.sum(), wide)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grad, want_grad.bfloat16())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_does_not_depend_on_the_chunks(reduction: str) -> None:
    """2048 classes are a block of the sums: chunks of whole blocks give the same bits."""
    tensors = linear_inputs(5, 8, 9000)
    losses = [
        fusedops.linear_cross_entropy(*tensors, reduction=reduction, chunk_size=size)
        for size in (None, 2048, 6144, 10000)
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest output of any operator."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.interpreter
def test_no_operator_of_the_triton_backend_makes_whole_logits() -> None:
    hidden, weight, target = linear_inputs(30, 4, 700)
    with fusedops.use_backend("triton"), LargestTensor() as seen:
        loss = fusedops.linear_cross_entropy(hidden, weight, target, chunk_size=64, recompute=True)
        torch.autograd.grad(loss, (hidden, weight))
    assert seen.numel <= max(30 * 64, weight.numel())


@by_backend
def test_half_precision_accumulates_in_float32(backend: str) -> None:
    """Over many chunks and rows the error stays that of one rounding, where bfloat16 sums drift."""
    hidden, weight, target = linear_inputs(48, 16, 300, torch.bfloat16)
    with fusedops.use_backend(backend):
        loss = fusedops.linear_cross_entropy(hidden, weight, target, reduction="sum", chunk_size=20)
        grads = torch.autograd.grad(loss, (hidden, weight))
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target, reduction="sum"), wide)
    for grad, exact in zip(grads, truth, strict=True):
        error = (grad.double() - exact).norm() / exact.norm()
        assert error < torch.finfo(torch.bfloat16).eps / 2


@by_backend
def test_a_shard_of_the_classes_divides_by_all_of_them(backend: str) -> None:
    """What a rank of ``vocab_parallel_cross_entropy`` calls: of 40 classes it has 17."""
    *leaves, target = linear_inputs(6, 5, 17)
    target[1], target[2] = -1, -2  # a class of another rank, and a row that is ignored
    options = (-2, 0.3, 0.0, 0.0, "none", 16, False, 40)
    incoming = torch.randn(6)
    tensors = [leaf.detach() for leaf in leaves]
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
        weights = 0.7 * hit + 0.3 / 40
        losses = shifted.logsumexp(-1) - (shifted * weights).sum(-1)
        grad_logits = incoming.to(dtype).unsqueeze(-1) * (shifted.softmax(-1) - weights)
        grad_logits[target == -2] = 0.0
        return losses.masked_fill(target == -2, 0.0), grad_logits @ w, grad_logits.T @ h

    results = zip((loss, *grads[:2]), eager(torch.float64), eager(torch.float32), strict=True)
    for i, tensors_of_one in enumerate(results):
        assert_close(*tensors_of_one, f"result {i}", depth=17)


@pytest.mark.parametrize("masked", [False, True])
def test_transformers_loss_is_the_squared_form(masked: bool) -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(2)
    logits = torch.randn(4 * 10, 8, requires_grad=True)
    attention_mask = torch.ones(4, 10)
    if masked:
        attention_mask[1, 6:] = 0
        attention_mask[3, :5] = 0
    theirs = modeling.load_balancing_loss_func((logits,), 8, 2, attention_mask)
    plan = moe_route(logits, 2, normalize=True)
    mask = attention_mask.reshape(-1).bool() if masked else None
    ours = moe_router_loss(logits, plan, form="squared", mask=mask)
    wide = logits.detach().double().requires_grad_()
    exact = moe_router_loss(wide, plan, form="squared", mask=mask)
    assert_close(ours.detach(), exact.detach(), theirs.detach(), "loss", 40)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    (truth,) = torch.autograd.grad(exact, wide)
    assert_close(grads[0], truth, grads[1], "gradient", 40)
