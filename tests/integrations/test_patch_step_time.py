"""What the report says about the time of a measured step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.seen = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        y = self.layers(self.norm(x))
        y = self.seen(y.transpose(1, 2)).transpose(1, 2)
        return {"loss": (y * torch.rand_like(y)).sum(), "kept": y if mask is None else y * mask}


X = torch.linspace(-1, 1, 4 * 32 * 64).reshape(4, 32, 64).bfloat16()


@pytest.fixture
def model() -> Block:
    return Block().bfloat16()


def test_shares_add_up_and_stock_classes_are_named(model: Block) -> None:
    stock = fusedops.describe(model, example=(X,)).step
    assert stock is not None
    assert stock.fused_share == 0.0
    assert {"Linear", "BatchNorm1d", "LayerNorm"} <= {entry.cls for entry in stock.stock}
    report = fusedops.patch(model, example={"x": X, "mask": None})
    step = report.step
    assert step is not None
    assert 0.05 < step.fused_share < 1.0
    assert step.ms == pytest.approx(step.fused_ms + sum(entry.ms for entry in step.stock))
    by_class = {entry.cls: entry for entry in step.stock}
    assert "Linear" not in by_class
    assert by_class["BatchNorm1d"].advice == "there is no rule for this class"
    assert "compile_passes()" in by_class["Block"].advice
    assert f"measured step: {step.ms:.1f} ms in operators, " in str(report)
    assert "BatchNorm1d: there is no rule for this class" in str(report)


def test_a_lower_level_advises_the_higher_one(model: Block) -> None:
    step = fusedops.patch(model, level="O1", example=X).step
    assert step is not None
    advice = {entry.cls: entry.advice for entry in step.stock}
    assert advice["Linear"] == 'patch(model, level="O2") fuses it'


@pytest.mark.parametrize("prepare", [nn.Module.train, nn.Module.eval], ids=["train", "eval"])
def test_nothing_of_the_model_changes(model: Block, prepare: Callable[..., Any]) -> None:
    prepare(model)
    model.norm.weight.grad = torch.full_like(model.norm.weight, 3.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    fusedops.patch(model, example=X)
    torch.testing.assert_close(dict(model.state_dict()), state, atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), random)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert gradients.pop("norm.weight") is not None
    assert set(gradients.values()) == {None}


def test_bad_examples_leave_the_model_unpatched(model: Block) -> None:
    with pytest.raises(TypeError, match="patch: example must be a tensor, a tuple"):
        fusedops.patch(model, example=3)
    with pytest.raises(ValueError, match=r"patch: example .* unexpected keyword argument 'y'"):
        fusedops.patch(model, example={"y": X})
    assert type(model.norm) is nn.LayerNorm
