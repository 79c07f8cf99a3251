"""A second forward leaves buffers as they are, and reads them as the first one did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from small_models import CHECKED, peak, squared
from torch import nn
from torch.nn.utils import parametrizations

from fusedops import memory


class FunctionalNorm(nn.BatchNorm1d):
    """Batch norm whose running statistics no counter of writes tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return nn.functional.batch_norm(x, mean, var, training=self.training)


class Average(nn.Module):
    """Reads a buffer that it has replaced, or written to, and keeps it for the backward."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.average * 0.5 + x.detach().mean(0)
        if self.replaces:
            self.average = value
        else:
            self.average.copy_(value)
        self.last = x.detach()
        return (x * self.average.clone()).sin() * self.average


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "functional norm": lambda: FunctionalNorm(8, affine=False),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral norm by hooks": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
    "replaced": lambda: Average(replaces=True),
    "written": lambda: Average(replaces=False),
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), MAKERS[name](), nn.Tanh()) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), *blocks)


def _state(model: nn.Module) -> dict[str, Any]:
    gradients = {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {**{name: buffer.clone() for name, buffer in model.named_buffers()}, **gradients}


def _trained(model: nn.Module, backward: Callable[..., None]) -> dict[str, Any]:
    batches = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    for batch in batches:
        backward(model, batch)
    model.eval()
    backward(model, batches[0])
    return _state(model.train())


def _once(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().sum().backward()


def _late(model: nn.Module, batch: torch.Tensor) -> None:
    """Two forwards before their backwards, the later one first."""
    losses = [model(batch * scale).square().sum() for scale in (1, 2)]
    for loss in reversed(losses):
        loss.backward()


def _in_two_passes(model: nn.Module, batch: torch.Tensor) -> None:
    """Gradients of inputs first and those of weights later, as zero-bubble schedules ask."""
    batch = batch.clone().requires_grad_()
    loss = model(batch).square().sum()
    torch.autograd.grad(loss, batch, retain_graph=True)
    loss.backward()


# Without a policy autograd refuses the backward of "written" after a second forward.
@pytest.mark.parametrize(
    ("module", "backward"),
    [
        (module, backward)
        for module in MAKERS
        for backward in (_once, _late, _in_two_passes)
        if (module, backward) != ("written", _late)
    ],
)
def test_buffers_and_gradients_keep_their_bits(module: str, backward: Callable[..., None]) -> None:
    model = _model(module)
    expected = _trained(copy.deepcopy(model), backward)
    for rules in (
        [memory.recompute("*")],
        [memory.recompute(""), memory.recompute("1")],  # nested
        [memory.recompute("*"), memory.save(ops="aten::addmm")],
        [memory.recompute("*"), memory.offload("*")],
        [memory.recompute(when=lambda saved: saved.op == "aten::native_batch_norm")],
    ):
        found = copy.deepcopy(model)
        memory.apply(found, memory.Policy(*rules), offload_settings=CHECKED)
        assert_same_bits(_trained(found, backward), expected)


def test_a_buffer_of_which_no_copy_was_made_is_an_error_and_later_none() -> None:
    class Seldom(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.calls in (1, 2):
                self.scale.mul_(2)
            return (x * self.scale.clone()).sin()

    model = nn.Sequential(nn.Linear(8, 8), Seldom())
    memory.apply(model, memory.Policy(memory.recompute("*")))
    x = torch.ones(2, 8)
    model(x).sum().backward()
    model[1].calls = 1
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match=r"wrote to buffers of 1 \(scale\), which no earlier"):
        loss.backward()
    model(x).sum().backward()
    assert torch.equal(model[1].scale, torch.full((8,), 4.0))


def test_only_buffers_that_a_forward_writes_to_are_copied() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1 << 16, 8))
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.mask[: len(x)]

    model = nn.Sequential(nn.Linear(8, 8), Masked())
    memory.apply(model, memory.Policy(memory.recompute("1")))
    first, later = (peak(model, squared(torch.randn(64, 8))) for _ in range(2))
    assert first > model[1].mask.nbytes > later
