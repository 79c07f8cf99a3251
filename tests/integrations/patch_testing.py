"""What the patch tests share: training steps to compare, against float64, within the budget."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import fusedops
from fusedops._core import dtypes

Loss = Callable[[nn.Module], torch.Tensor]


def gradients(model: nn.Module, loss: Loss, *, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Run one training step from a fixed seed; return the loss and every parameter's gradient."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model)
    value.backward()
    results = {"loss": value.detach()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        results[name] = parameter.grad.detach().clone()
    return results


def assert_same_training(
    patched: nn.Module, stock: nn.Module, loss: Loss, *, autocast: bool = False
) -> None:
    """Compare loss and gradients with the unpatched model's, both against float64."""
    actual = gradients(patched, loss, autocast=autocast)
    eager = gradients(stock, loss, autocast=autocast)
    truth = gradients(copy.deepcopy(stock).double(), loss)
    dtype = torch.bfloat16 if autocast else torch.float32
    assert actual.keys() == truth.keys()
    for name, expected in truth.items():
        assert actual[name].dtype == eager[name].dtype, name
        budget = dtypes.error_budget(eager[name], expected, dtype, depth=64)
        excess = (actual[name].double() - expected).abs() - budget
        assert excess.max() <= 0, f"{name}: {excess.max():.3g} beyond the budget"


def assert_close(actual: torch.Tensor, stock: torch.Tensor, depth: int = 1024) -> None:
    """Compare float32 results of two programs that should round alike."""
    exact = stock.double()
    budget = dtypes.error_budget(stock, exact, torch.float32, depth=depth)
    assert ((actual.double() - exact).abs() <= budget).all()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of each op inside the block, whichever the backend."""
    calls: Counter[str] = Counter()
    fusedops.reset_counters()
    yield calls
    for (op, _), count in fusedops.counters().items():
        calls[op] += count
