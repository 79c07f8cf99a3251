"""``patch(model, example=...)``: what its step reports, that it leaves no trace, and calibration.

With ``calibrate=True`` the slower module is not replaced.
"""

from __future__ import annotations

import copy
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import BERT, DENSE, ENCODERS, IDS, SPARSE, loss
from patch_testing import assert_same_training
from torch import nn
from torch.nn.utils import parametrize

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf import calibration as calibrate
from fusedops.integrations.hf.calibration import CalibrationFinding
from fusedops.integrations.hf.rules import torch_modules
from fusedops.runtime.timer import Timing, Variant


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


ROWS = torch.linspace(-1, 1, 4 * 32 * 64).reshape(4, 32, 64).bfloat16()


@pytest.fixture
def model() -> Block:
    return Block().bfloat16()


def test_shares_add_up_and_stock_classes_are_named(model: Block) -> None:
    stock = describe(model, example=(ROWS,)).step
    assert stock is not None
    assert stock.fused_share == 0.0
    assert {"Linear", "BatchNorm1d", "LayerNorm"} <= {entry.cls for entry in stock.stock}
    report = fusedops.patch(model, example={"x": ROWS, "mask": None})
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
    step = fusedops.patch(model, level="O1", example=ROWS).step
    advice = {entry.cls: entry.advice for entry in step.stock}
    assert advice["Linear"] == 'patch(model, level="O2") fuses it'


def test_bad_examples_leave_the_model_unpatched(model: Block) -> None:
    with pytest.raises(TypeError, match="patch: example must be a tensor, a tuple"):
        fusedops.patch(model, example=3)
    with pytest.raises(ValueError, match=r"patch: example .* unexpected keyword argument 'y'"):
        fusedops.patch(model, example={"y": ROWS})
    with pytest.raises(ValueError, match="patch: calibrate measures .*: pass example="):
        fusedops.patch(model, calibrate=True)
    with pytest.raises(TypeError, match="patch: calibrate must be a bool or a path, got int"):
        fusedops.patch(model, example=ROWS, calibrate=1)
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
    model, x = Stateful(forwards_fail), ROWS.float()
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
        fusedops.patch(model, example=ROWS)
    assert type(model.norm) is nn.LayerNorm and torch.equal(weight, torch.ones_like(weight))
    fusedops.patch(model.eval(), example=ROWS)  # has no backward
    with pytest.raises(RuntimeError, match="run the model once before"):
        fusedops.patch(nn.Sequential(nn.LazyLinear(4)), example=ROWS)


def test_the_report_names_parameters_without_gradient(
    model: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.layers[0].weight.requires_grad_(False)
    model.norm = nn.RMSNorm(64).bfloat16()
    model.extra = nn.LayerNorm(64)  # not called, stock or patched
    report = fusedops.patch(model, example=ROWS)
    gradients = {entry.name: entry.gradients for entry in report.modules}
    assert gradients["layers.0"] == "bias" and gradients["norm"] == "weight"
    assert gradients["extra"] == "not weight, not bias" and gradients["layers.1"] == ""
    assert report.step.without_gradient == () and "WARNING" not in str(report)
    op = torch_modules.rms_norm
    frozen = lambda x, shape, weight, eps: op(x, shape, weight.detach(), eps)  # noqa: E731
    monkeypatch.setattr(torch_modules, "rms_norm", frozen)
    report = fusedops.patch(model, example=ROWS)
    assert report["norm"].gradients == "not weight"
    assert report.step.without_gradient == ("norm.weight",)
    assert "no gradient since the model is patched: norm.weight" in str(report)
    assert describe(model)["norm"].gradients == ""
    assert describe(model.eval(), example=ROWS)["norm"].gradients == ""


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


# Calibration.

X = torch.linspace(-1, 1, 4 * 32).view(4, 32)
LOST = CalibrationFinding(0.5, True, "float32, 4x32")


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine has time for everything."""
    monkeypatch.setattr(calibrate, "BUDGET", 60.0)


def set_times(monkeypatch: pytest.MonkeyPatch, *patched: list[float]) -> None:
    """Let the patched modules take these times in turn, and the stock ones 1.0."""
    remaining = list(patched)

    def measure(variants: list[Variant], *_: Any) -> Timing:
        for variant in variants:
            with variant.context():
                variant.run(variant.prepare())
        rounds = {"stock": [1.0] * 5, "patched": remaining.pop(0)}
        return Timing(rounds, {name: [False] * 5 for name in rounds}, least=1)

    monkeypatch.setattr(calibrate, "measure", measure)


def norms() -> nn.Sequential:
    return nn.Sequential(nn.RMSNorm(32), nn.Tanh(), nn.RMSNorm(32))


def test_a_slow_kernel_is_left_alone_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, [2.0] * 5, [2.0] * 5)
    model = norms()
    expected = model(X)
    report = fusedops.patch(model, strict=True, example=X, calibrate=True)
    for name in ("0", "2"):  # of one shape: measured once
        assert type(model.get_submodule(name)) is nn.RMSNorm
        assert not report[name].replaced and not report[name].failed
        assert report[name].reason == "stock kept: 0.50x measured on this machine, float32, 4x32"
    assert torch.equal(model(X), expected)
    assert describe(model, example=X)["0"].reason == report["0"].reason
    assert describe(model)["0"].reason == report["0"].reason
    fusedops.unpatch(model)
    assert describe(model)["0"].reason == "not patched"


def test_the_stock_module_must_win_twice_and_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    for rounds, kept, figure in (
        ([[2.0] * 5, [1.25] * 5], True, "0.80x"),
        ([[2.0] * 5, [2.0] * 4 + [0.9]], True, "0.50x"),
        ([[2.0] * 5, [2.0] * 3 + [0.9] * 2], False, "0.50x"),
        ([[2.0] * 3 + [0.9] * 2], False, "0.50x"),
        ([[1.04] * 5, [1.04] * 5], False, "0.96x"),
        ([[0.5] * 5], False, "2.00x"),
    ):
        set_times(monkeypatch, *rounds)
        report = fusedops.patch(nn.Sequential(nn.RMSNorm(32)), example=X, calibrate=True)
        prefix = "stock kept: " if kept else ""
        assert report["0"].reason.startswith(f"{prefix}{figure} measured")
        assert report["0"].replaced == (not kept)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.row, self.same, self.unused = (nn.RMSNorm(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.rows(x)) + self.row(x[:1])


def test_inputs_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, [0.5] * 5, [0.5] * 5)  # of two shapes
    report = fusedops.patch(Branches(), example=X, calibrate=True)
    assert {entry.name: entry.reason.rpartition(", ")[2] for entry in report.modules} == {
        "rows": "4x32",
        "row": "1x32",
        "same": "4x32",
        "unused": "not measured: the example step does not call it",
    }


class UnderAutocast(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast_and_backward_of_the_step_are_measured(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, autocast, backwards = torch_modules.rms_norm, set(), []

    def rms_norm(*args: Any) -> torch.Tensor:
        autocast.add(torch.is_autocast_enabled("cpu"))
        return op(*args)

    monkeypatch.setattr(torch_modules, "rms_norm", rms_norm)
    set_times(monkeypatch, [0.5] * 5)
    model = UnderAutocast(nn.RMSNorm(32)).train(training)
    model[0].weight.register_hook(lambda grad: backwards.append(1))
    report = fusedops.patch(model, example=X, calibrate=True)
    assert report["0"].reason.endswith("machine, float32 under autocast to bfloat16, 4x32")
    assert autocast == {True}
    assert len(backwards) == training * (3 + 6)  # three steps, and three runs of two variants


def test_a_block_that_loses_leaves_its_children_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = BERT.model()
    name = "bert.encoder.layer.0.intermediate"
    assert fusedops.patch(copy.deepcopy(model))[f"{name}.dense"].reason == f"inside {name}"
    monkeypatch.setattr(calibrate, "_measured", lambda *_: LOST)
    batch = BERT.inputs(model)
    report = fusedops.patch(model, example=batch, calibrate=True)
    assert report[name].reason == report[f"{name}.dense"].reason == str(LOST)
    assert report.num_replaced == 0


def test_what_has_hooks_or_raises_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = norms(), []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    report = fusedops.patch(model, example=X, calibrate=True)
    assert report["2"].reason == "not measured: it has hooks" and len(calls) == 3  # the steps
    assert "measured on this machine" in report["0"].reason

    def refused(*_: Any) -> Timing:
        raise RuntimeError("not now\nsecond line")

    monkeypatch.setattr(calibrate, "measure", refused)
    report = fusedops.patch(norms(), example=X, calibrate=True)
    assert report["0"].replaced and report["0"].reason == "not measured: RuntimeError: not now"


def test_a_long_step_gives_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET", 0.0)
    monkeypatch.setattr(calibrate, "STEPS", 1_000_000)
    report = fusedops.patch(norms(), example=X, calibrate=True)
    assert "measured on this machine" in report["0"].reason


def test_time_that_is_over_leaves_the_rest_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET", 0.0)
    monkeypatch.setattr(calibrate, "STEPS", 0)
    report = fusedops.patch(norms(), example=X, calibrate=True)
    assert report["0"].replaced and report["2"].replaced
    assert report["0"].reason == "not measured: the time for calibration was over"


FAMILIES = {
    "Gemma2": DENSE["Gemma2"],  # whose cache has a graph in training
    "OPT": DENSE["OPT"],
    "Mixtral": SPARSE["Mixtral"],
    **{name: ENCODERS[name] for name in ("BertForMaskedLM", "T5ForConditionalGeneration")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_wins_the_model_trains_the_same(family: str) -> None:
    stock = FAMILIES[family].model()
    patched = copy.deepcopy(stock)
    batch = {"input_ids": IDS, "labels": IDS}
    fusedops.patch(patched, example=batch, calibrate=True)
    findings = [calibrate.finding_of(module) for module in patched.modules()]
    asked = [finding for finding in findings if finding is not None]
    assert asked and all(finding.speed_up is not None for finding in asked), asked
    assert_same_training(patched, stock, loss)


def test_a_file_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    set_times(monkeypatch, [2.0] * 5, [2.0] * 5, [0.5] * 5)
    first = fusedops.patch(norms(), example=X, calibrate=path)
    assert first["0"].reason.startswith("stock kept: 0.")
    (tmp_path / "other").touch()  # has the permissions that the umask leaves
    assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(tmp_path / "other").st_mode)
    second = fusedops.patch(norms(), example=X, calibrate=str(path))  # without measuring
    assert second["0"].reason == first["0"].reason
    # What is not in it is measured and added: other shapes of inputs as well.
    report = fusedops.patch(norms(), example=X[:2], calibrate=path)
    assert report["0"].reason.startswith("2.00x")
    keys = [entry["key"] for entry in json.loads(path.read_text())["entries"]]
    assert [key.split("; ")[3] for key in keys] == ["inputs 2x32", "inputs 4x32"]


@pytest.mark.parametrize("text", ["[]", '{"kind": "calibration", "schema": 1, "entries": []}'])
def test_a_file_of_something_else_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path, model, calls = tmp_path / "other.json", norms(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    path.write_text(text)
    with pytest.raises(ValueError, match="patch: calibrate must name a file .*other.json"):
        fusedops.patch(model, example=X, calibrate=path)
    with pytest.raises(FileNotFoundError, match=r"a folder that exists, got .*missing.found\.json"):
        fusedops.patch(model, example=X, calibrate=tmp_path / "missing" / "found.json")
    assert path.read_text() == text and calls == [] and type(model[0]) is nn.RMSNorm
