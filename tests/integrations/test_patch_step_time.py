"""What a step with ``example`` reports, and that it leaves no trace in the model."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusedops
from fusedops.integrations.hf.rules import torch_modules


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


def test_bad_examples_leave_the_model_unpatched(model: Block) -> None:
    with pytest.raises(TypeError, match="patch: example must be a tensor, a tuple"):
        fusedops.patch(model, example=3)
    with pytest.raises(ValueError, match=r"patch: example .* unexpected keyword argument 'y'"):
        fusedops.patch(model, example={"y": X})
    assert type(model.norm) is nn.LayerNorm


class Stateful(nn.Module):
    """A module whose forward changes whatever a forward may change."""

    def __init__(self, forwards_fail: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.table = nn.Embedding(8, 64, max_norm=0.1)
        self.register_buffer("mean", torch.zeros(64))
        self.generator = torch.Generator().manual_seed(1)
        self.calls, self.history, self.nested = 0, [], {"seen": [[]], "last": None}
        self.plain, self.numbers = torch.zeros(1), set()
        self.hidden = [nn.BatchNorm1d(64)]  # not registered
        self.forwards_fail = forwards_fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(x)
        self.nested["seen"][0].append(self.calls)
        self.numbers.add(self.calls)
        self.nested["last"] = x
        self.added = x
        self.mean.add_(1.0)
        self.plain += 1.0
        torch.rand(1, generator=self.generator), torch.rand(1), random.random(), np.random.rand()
        x.add_(1.0)
        y = self.hidden[0](self.norm(x).mean(1)) + self.table(torch.arange(4))
        if self.forwards_fail:
            raise KeyError("after all")
        return y * self.norm.weight


def state_of(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Return copies of all that ``Stateful`` changes."""
    values = {name: value for name, value in vars(model).items() if name[0] != "_"}
    values["hidden"] = model.hidden[0].running_mean
    values["numbers"] = sorted(model.numbers)
    values["generator"] = model.generator.get_state()
    numpy = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, "x": x}
    grads = {f"{name}.grad": weight.grad for name, weight in model.named_parameters()}
    return copy.deepcopy(values | states | grads | dict(model.state_dict()))


@pytest.mark.parametrize("calibrated", [False, True], ids=["example", "calibrate"])
@pytest.mark.parametrize("prepare", [nn.Module.train, nn.Module.eval], ids=["train", "eval"])
@pytest.mark.parametrize("forwards_fail", [False, True], ids=["runs", "raises"])
def test_a_step_leaves_no_trace(
    forwards_fail: bool, prepare: Callable[..., Any], calibrated: bool
) -> None:
    model, x = Stateful(forwards_fail), X.float()
    prepare(model)
    model.norm.weight.grad = torch.full((64,), 3.0)
    graph = model.norm.weight.exp()  # its backward needs weights that nobody has written to
    before = state_of(model, x)
    if forwards_fail:
        with pytest.raises(ValueError, match="an error from it: KeyError: 'after all'"):
            fusedops.patch(model, example=x, calibrate=calibrated)
    else:
        fusedops.patch(model, example=x, calibrate=calibrated)
    after = state_of(model, x)
    assert list(after) == list(before)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=0, rtol=0)
    graph.sum().backward()


def test_what_cannot_be_restored_is_refused(model: Block) -> None:
    weight = model.norm.weight
    weight.register_post_accumulate_grad_hook(lambda weight: weight.data.sub_(weight.grad))
    with pytest.raises(RuntimeError, match=r"post-accumulate-grad hook of norm\.weight"):
        fusedops.patch(model, example=X)
    assert type(model.norm) is nn.LayerNorm and torch.equal(weight, torch.ones_like(weight))
    fusedops.patch(model.eval(), example=X)  # has no backward
    with pytest.raises(RuntimeError, match="run the model once before"):
        fusedops.patch(nn.Sequential(nn.LazyLinear(4)), example=X)


def test_the_report_names_parameters_without_gradient(
    model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.layers[0].weight.requires_grad_(False)
    model.norm = nn.RMSNorm(64).bfloat16()
    model.extra = nn.LayerNorm(64)  # not called, stock or patched
    report = fusedops.patch(model, example=X)
    gradients = {entry.name: entry.gradients for entry in report.modules}
    assert gradients["layers.0"] == "bias" and gradients["norm"] == "weight"
    assert gradients["extra"] == "not weight, not bias" and gradients["layers.1"] == ""
    assert report.step.without_gradient == () and "WARNING" not in str(report)
    op = torch_modules.rms_norm
    frozen = lambda x, shape, weight, eps: op(x, shape, weight.detach(), eps)  # noqa: E731
    monkeypatch.setattr(torch_modules, "rms_norm", frozen)
    report = fusedops.patch(model, example=X)
    assert report["norm"].gradients == "not weight"
    assert report.step.without_gradient == ("norm.weight",)
    assert "no gradient since the model is patched: norm.weight" in str(report)
    assert fusedops.describe(model)["norm"].gradients == ""
    assert fusedops.describe(model.eval(), example=X)["norm"].gradients == ""


class WeightAdapter(nn.Module):
    """Changes the weights of experts during its forward, as PEFT's ``ParamWrapper`` does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.PReLU(init=1.0)  # a module with a trained number

    def forward(self, *args: Any) -> Any:
        parametrize.register_parametrization(self.base, "down_proj", self.scale)
        try:
            return self.base(*args)
        finally:
            parametrize.remove_parametrizations(self.base, "down_proj", leave_parametrized=False)


def test_an_adapter_of_expert_weights_receives_gradients() -> None:
    pytest.importorskip("transformers")
    from causal_families import IDS, SPARSE

    model = SPARSE["Mixtral"].model().train().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts = WeightAdapter(layer.mlp.experts)
    names = [name for name, _ in model.named_parameters()]
    batch = {"input_ids": IDS, "labels": IDS}
    report = fusedops.patch(model, example=batch, calibrate=True)
    assert report.step.without_gradient == ()
    assert names == [name for name, _ in model.named_parameters()]
    model(**batch).loss.backward()
    assert all(layer.mlp.experts.scale.weight.grad is not None for layer in model.model.layers)
