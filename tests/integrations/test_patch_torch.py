"""Plain torch modules: patched by exact type, and the errors of patch and unpatch."""

from __future__ import annotations

import pytest
import torch
from home_made import feed_forward
from patch_testing import assert_all_close, assert_close, counted, patched_pair
from torch import nn

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf.rules import rule, torch_modules, torch_transformer

INPUT = torch.linspace(-2, 2, 20 * 32).view(20, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("own_products")
def test_one_row_has_the_bits_that_it_has_in_a_batch(dtype: torch.dtype) -> None:
    """Decoding: weights come from memory there, and are read once, without being packed."""
    patched, stock = (model.to(dtype) for model in patched_pair(feed_forward(nn.Tanh())))
    batch = INPUT.to(dtype)
    with counted() as calls:
        found = patched(batch[:1])
    assert calls["linear_act"] == 2
    assert_close(found, stock(batch[:1]))
    assert torch.equal(found, patched(batch)[:1])


@pytest.mark.usefixtures("own_products")
def test_the_report_knows_what_runs_inside_a_sequence() -> None:
    model = nn.Sequential(nn.LayerNorm(48), *feed_forward(nn.GELU()), nn.GELU())
    report = fusedops.patch(model)
    inside = "inside the model's own forward"
    assert [report[str(index)].reason for index in range(5)] == ["", inside, inside, inside, ""]
    model[2].register_forward_hook(lambda *_: None)  # leaves the second layer and what follows
    assert [describe(model)[str(each)].reason for each in range(5)] == ["", "", "", inside, inside]


@pytest.mark.usefixtures("own_products")
def test_a_row_of_one_module_names_the_block_around_it() -> None:
    model = nn.Sequential(nn.Tanh(), feed_forward(nn.GELU()))
    fusedops.patch(model)
    lines = str(describe(model)).splitlines()
    assert lines[0] == "Sequential: 4 of 5 modules replaced"  # describe knows no level
    assert [line.split()[-2:] for line in lines if line.startswith("1.1 ")] == [["inside", "1"]]


def test_shared_module_is_patched_once() -> None:
    norm = nn.LayerNorm(32)
    model = nn.Sequential(norm, nn.Tanh(), norm)
    report = fusedops.patch(model)
    assert [entry.name for entry in report.replaced] == ["0"]
    with counted() as calls:
        model(INPUT)
    assert calls == {"layer_norm": 2}


@pytest.mark.usefixtures("own_products")
def test_meta_model_is_patched_and_runs_when_materialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8))
    report = fusedops.patch(model)
    assert report["0"].backend == "known when the parameters are on a device"
    assert model(INPUT.to("meta")).shape == (20, 8)
    model.to_empty(device="cpu")
    with counted() as calls:
        model(INPUT)
    assert calls == {"layer_norm": 1, "linear_act": 1}


def test_wrong_arguments_are_named() -> None:
    model = nn.LayerNorm(4)
    with pytest.raises(TypeError, match=r"patch: model must be a torch\.nn\.Module, got str"):
        fusedops.patch("model")
    with pytest.raises(TypeError, match="unpatch: model must be"):
        fusedops.unpatch(3)
    with pytest.raises(TypeError, match="describe: model must be"):
        describe(None)
    with pytest.raises(
        ValueError, match=r"patch: level must be one of 'O0', 'O1', 'O2', 'O3', got '02'"
    ):
        fusedops.patch(model, level="02")
    with pytest.raises(TypeError, match="patch: strict must be a bool, got int"):
        fusedops.patch(model, strict=1)
    with pytest.raises(TypeError, match="levels"):
        fusedops.patch(model, levels="O1")
    with pytest.raises(fusedops.UnsupportedError, match="no module of Tanh could be replaced"):
        fusedops.patch(nn.Tanh(), strict=True)
    assert type(model) is nn.LayerNorm


def test_products_that_torch_computes_faster_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_modules, "_SERVED", (torch.bfloat16,))
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8), nn.LayerNorm(8))
    expected = model(INPUT)
    report = fusedops.patch(model, level="O3", strict=True)
    assert report.counts == {"gelu": 1, "layer_norm": 1}
    assert report["0"].reason == "torch's own product is as fast here"
    with counted() as calls:
        torch.testing.assert_close(model(INPUT), expected)
    assert calls == {"gelu": 1, "layer_norm": 1}
    with counted() as calls, torch.autocast("cpu", torch.bfloat16):
        model(INPUT)
    assert calls.keys() >= {"mlp", "layer_norm"}
    alone = nn.Sequential(nn.Linear(32, 8), nn.Tanh()).double()
    assert "as fast" in fusedops.patch(alone)["0"].reason
    with counted() as calls:
        alone(INPUT.double())
    assert not calls


def test_few_elements_are_torchs_where_its_products_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule, "TORCH_MULTIPLIES_FLOAT32", True)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
    fusedops.patch(model)
    token, batch = torch.randn(1, 1, 32), torch.randn(1, 1024, 32)
    for input, is_fused in ((token, False), (batch, True), (token.bfloat16(), True)):
        with counted() as calls:
            model.to(input.dtype)(input)
        assert bool(calls.get("layer_norm")) == is_fused
    model.float()
    with counted() as calls, torch.autocast("cpu", torch.bfloat16):
        model(token)
    assert calls["layer_norm"] == 1


TARGET = torch.arange(20).mul(3).remainder(32)
PROBABILITIES = INPUT.softmax(-1)


@pytest.mark.parametrize(
    ("stock", "target", "fused"),
    [
        (nn.CrossEntropyLoss(), TARGET, True),
        (nn.CrossEntropyLoss(ignore_index=3, reduction="sum"), TARGET, True),
        (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"), TARGET, True),
        (nn.CrossEntropyLoss(torch.linspace(0.5, 1, 32)), TARGET, False),
        (nn.CrossEntropyLoss(label_smoothing=0.1), PROBABILITIES, False),
    ],
)
def test_the_loss_module(stock: nn.CrossEntropyLoss, target: torch.Tensor, fused: bool) -> None:
    patched, stock = patched_pair(stock)
    values, logits = [], INPUT.clone().requires_grad_()
    for module in (patched, stock):
        with counted() as calls:
            value = module(logits, target)
            values.append((value, *torch.autograd.grad(value.sum(), logits)))
        assert calls["cross_entropy"] == (module is patched and fused)
    assert_all_close(*values)
    images = INPUT.view(2, 10, 4, 8)
    if stock.weight is None and stock.reduction != "none":
        pixels = TARGET[:16].remainder(10).repeat(4).view(2, 4, 8)
        assert torch.equal(patched(images, pixels), stock(images, pixels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
def test_rms_norm_is_torchs_to_the_bit(eps: float | None, dtype: torch.dtype) -> None:
    for stock in (nn.RMSNorm(32, eps), nn.RMSNorm((4, 32), eps, elementwise_affine=False)):
        stock = stock.to(dtype)
        if stock.weight is not None:
            nn.init.normal_(stock.weight)
        patched, _ = patched_pair(stock)
        rows = INPUT.view(5, 4, 32).to(dtype)
        with counted() as calls:
            actual = patched(rows)
        assert calls == {"rms_norm": 1}
        assert torch.equal(actual, stock(rows))


def test_rms_norm_of_two_dtypes_stays_with_torch() -> None:
    patched, stock = patched_pair(nn.RMSNorm(32))
    with counted() as calls:
        assert torch.equal(patched(INPUT.bfloat16()), stock(INPUT.bfloat16()))
    assert not calls


class _Window(nn.Module):
    """As torchvision's attention of shifted windows: a function gets the weights of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _windowed(
            self.norm(x), self.qkv.weight, self.proj.weight, self.qkv.bias, self.proj.bias
        )


def _windowed(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    query, key, value = nn.functional.linear(x, weights[0], weights[2]).chunk(3, -1)
    return nn.functional.linear(query * key + value, weights[1], weights[3])


class _Shared(nn.Module):
    """It reads the weight of a layer that its child calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.caller = nn.Sequential(self.inner, nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.caller(x) * self.inner.weight.sum()


@pytest.mark.usefixtures("own_products")
def test_layers_that_nobody_calls_are_not_reported_as_replaced() -> None:
    model = nn.Sequential(_Window(), nn.Linear(8, 8), _Shared())
    report = fusedops.patch(model)
    with counted() as calls:
        model(torch.randn(4, 8))
    assert calls["linear_act"] == 2 and calls["layer_norm"] == 1
    assert report.counts == {"linear_act": 2, "layer_norm": 1}
    for name in ("0.qkv", "0.proj"):
        assert report[name].reason == "_Window reads its parameters and does not call it"
        assert type(model.get_submodule(name)) is nn.Linear and not report[name].failed
    assert fusedops.describe(model).counts == report.counts


class DerivedLinear(nn.Linear):
    """It may compute another thing than ``nn.Linear`` one day."""


class OwnNorm(nn.LayerNorm):
    """It has a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class UnknownNorm(nn.Module):
    """There is no rule for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_reports_give_the_reason() -> None:
    overridden = nn.LayerNorm(8)
    overridden.forward = lambda input: input
    reasons = {
        nn.LayerNorm(8): "",
        DerivedLinear(8, 8): "it is derived from Linear, and the rule is for Linear itself",
        OwnNorm(8): "it is derived from LayerNorm and has a forward of its own",
        UnknownNorm(): "there is no rule for this class",
        fusedops.nn.LayerNorm(8): "it calls fused ops itself",
        overridden: "its forward is overridden on the instance",
        nn.CrossEntropyLoss(torch.ones(4)): "it has class weights",
        nn.CrossEntropyLoss(): "",
    }
    model = nn.ModuleList([*reasons, nn.MultiheadAttention(8, 2)])
    before = [type(module) for module in model.modules()]
    report = fusedops.patch(model)
    for index, (module, reason) in enumerate(reasons.items()):
        entry = report[str(index)]
        assert (entry.reason, entry.replaced) == (reason, not reason)
        derived = isinstance(module, (DerivedLinear, OwnNorm))
        assert entry.failed == (derived or module is overridden or "weights" in reason)
    reason = "MultiheadAttention reads its parameters and does not call it"
    assert report["8.out_proj"].reason == reason
    with pytest.raises(fusedops.UnsupportedError, match="1: it is derived from Linear"):
        fusedops.patch(model, strict=True)
    fusedops.unpatch(model)
    assert [type(module) for module in model.modules()] == before


def test_a_layer_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_transformer.known_code, "known_as", lambda *args: None)
    layer = nn.TransformerEncoderLayer
    rule = torch_transformer._rule(layer, torch_transformer._EncoderLayer, layer.forward, ())
    plan = rule.current_plan(layer(8, 2))
    assert plan.reason == "this torch has another TransformerEncoderLayer, whose code is not known"
