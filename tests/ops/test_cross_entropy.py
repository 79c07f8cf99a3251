"""What is special about cross_entropy: torch's edge cases, what it saves, small losses, DTensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_close
from test_sharding import WORLD

import fusedops

BACKENDS = [
    pytest.param("cpp"),
    pytest.param("torch"),
    pytest.param("triton", marks=pytest.mark.interpreter),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, scale: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (torch.randn(rows, classes) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(0, classes, (rows,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_ignored_is_torchs_nan_and_no_gradient(backend: str) -> None:
    logits, _ = inputs(3, 8)
    target = torch.full((3,), -100)
    with fusedops.use_backend(backend):
        loss = fusedops.cross_entropy(logits, target)
        assert loss.isnan() and F.cross_entropy(logits, target).isnan()
        (grad,) = torch.autograd.grad(loss, logits)
        assert torch.equal(grad, torch.zeros_like(grad))
        assert fusedops.cross_entropy(logits, target, reduction="sum") == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_an_ignored_row_may_hold_anything(backend: str, garbage: float) -> None:
    logits, target = inputs(4, 9)
    with torch.no_grad():
        logits[2] = garbage
    target[2] = -100
    with fusedops.use_backend(backend):
        losses = fusedops.cross_entropy(logits, target, z_loss=0.1, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert losses[2] == 0 and torch.equal(grad[2], torch.zeros(9))
    assert losses.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
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
        losses = fusedops.cross_entropy(logits, target, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    want = F.cross_entropy(logits, target, reduction="none")
    (want_grad,) = torch.autograd.grad(want.sum(), logits)
    torch.testing.assert_close(losses, want)
    torch.testing.assert_close(grad, want_grad)
    assert torch.equal(grad[:, half], torch.zeros_like(grad[:, half]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top", [-1000.0, -40.0, 3.0, 20.0, 1000.0])
def test_the_maximum_may_be_anywhere(backend: str, top: float) -> None:
    """The guess of the maximum is proved wrong in the first, a middle and the last block."""
    logits, target = inputs(3, 9001)
    with torch.no_grad():
        logits -= 50.0 if top > 0 else 3000.0
        for row, column in enumerate((5, 4500, 9000)):
            logits[row, column] = top
    with fusedops.use_backend(backend):
        losses = fusedops.cross_entropy(logits, target, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    truth = F.cross_entropy(wide, target, reduction="none")
    (true_grad,) = torch.autograd.grad(truth.sum(), wide)
    eager = F.cross_entropy(logits, target, reduction="none")
    (eager_grad,) = torch.autograd.grad(eager.sum(), logits)
    assert_close(losses.detach(), truth.detach(), eager.detach(), "losses")
    assert_close(grad, true_grad, eager_grad, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("margin", [5.0, 12.0, 18.0, 60.0])
def test_a_sure_prediction_has_a_small_loss_and_never_a_negative_one(
    backend: str, dtype: torch.dtype, margin: float
) -> None:
    logits, target = inputs(64, 4099, dtype, scale=0.1)
    with torch.no_grad():
        logits[torch.arange(64), target] = margin
    wide = logits.detach().double()
    with fusedops.use_backend(backend), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = fusedops.cross_entropy(logits, target, reduction="none").detach()
    assert losses.dtype == torch.float32
    truth = F.cross_entropy(wide, target, reduction="none")
    eager = F.cross_entropy(logits.detach().float(), target, reduction="none")
    assert_close(losses, truth, eager, "losses")
    assert (losses >= 0).all()


def test_torchs_layout_with_classes_in_the_middle_is_one_movedim_away() -> None:
    logits, target = torch.randn(2, 7, 4), torch.randint(0, 7, (2, 4))
    ours = fusedops.cross_entropy(logits.movedim(1, -1), target)
    torch.testing.assert_close(ours, F.cross_entropy(logits, target))


@pytest.mark.interpreter
def test_out_of_range_on_triton_is_nan_in_its_row_only() -> None:
    logits, target = inputs(3, 9)
    target[1] = 9
    with fusedops.use_backend("triton"):
        losses = fusedops.cross_entropy(logits, target, reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(-1).tolist() == [False, True, False]
    assert grad[::2].isfinite().all()


def _mean_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    logits, target = inputs(7, 33)
    target[:3] = -100  # the ranks count differently
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
    for reduction in ("mean", "sum"):
        placed = distribute_tensor(logits.detach(), mesh, [Shard(0)]).requires_grad_()
        where = distribute_tensor(target, mesh, [Shard(0)])
        with CommDebugMode() as communication:
            loss = fusedops.cross_entropy(placed, where, reduction=reduction, **options)
            whole = loss.full_tensor()
        counts = {str(op): n for op, n in communication.get_comm_counts().items()}
        assert set(counts) == {"c10d_functional.all_reduce"}, counts  # of numbers, not of logits
        (grad,) = torch.autograd.grad(loss, placed)
        assert grad.placements == (Shard(0),)
        want = fusedops.cross_entropy(logits, target, reduction=reduction, **options)
        (want_grad,) = torch.autograd.grad(want, logits)
        torch.testing.assert_close(whole, want.detach())
        torch.testing.assert_close(grad.full_tensor(), want_grad)


@pytest.mark.distributed
def test_sharded_rows_reduce_numbers_only(on_new_world: Callable[..., Any]) -> None:
    on_new_world(_mean_worker)


@pytest.mark.parametrize("backend", BACKENDS)
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
