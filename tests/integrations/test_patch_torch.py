"""Plain torch modules: patched by exact type, and the errors of patch and unpatch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from patch_testing import assert_close, assert_same_training, counted, patched_pair
from torch import nn

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf.rules import torch_modules, torch_transformer

INPUT = torch.linspace(-2, 2, 20 * 32).view(20, 32)


def loss(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(INPUT.to(dtype)).square().mean()


def feed_forward(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), activation, nn.Linear(48, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(32),
    "LayerNorm, no bias": lambda: nn.LayerNorm(32, eps=0.1, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "Linear": lambda: nn.Linear(32, 8),
    "Linear, no bias": lambda: nn.Linear(32, 8, bias=False),
    "GELU last": lambda: nn.Sequential(nn.Linear(32, 8), nn.LayerNorm(8), nn.GELU()),
    "GELU inside": lambda: nn.Sequential(nn.Linear(32, 8), nn.GELU("tanh"), nn.LayerNorm(8)),
    "MLP, GELU": lambda: feed_forward(nn.GELU()),
    "MLP, tanh GELU": lambda: feed_forward(nn.GELU("tanh")),
    "MLP, ReLU": lambda: feed_forward(nn.ReLU()),
    "MLP, SiLU": lambda: feed_forward(nn.SiLU()),
    "MLP, Tanh": lambda: feed_forward(nn.Tanh()),
    "MLP and more": lambda: nn.Sequential(
        *feed_forward(nn.GELU()), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 3)
    ),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_matches_stock(make: Callable[[], nn.Module], autocast: bool) -> None:
    patched, stock = patched_pair(make())
    assert_same_training(patched, stock, loss, autocast=autocast, draws=16)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: feed_forward(nn.GELU()), {"mlp": 1}),
        (lambda: feed_forward(nn.Tanh()), {"linear_act": 2}),
        (lambda: nn.Sequential(*feed_forward(nn.ReLU()), nn.GELU()), {"mlp": 1, "gelu": 1}),
        (lambda: nn.Sequential(nn.Linear(32, 4), nn.SiLU(), nn.Dropout()), {"linear_act": 1}),
        (lambda: nn.Sequential(nn.GELU("tanh"), nn.LayerNorm(32)), {"gelu": 1, "layer_norm": 1}),
        (lambda: nn.LayerNorm(32, elementwise_affine=False), {"layer_norm": 1}),
    ],
)
@pytest.mark.usefixtures("own_products")
def test_which_ops_run(make: Callable[[], nn.Module], expected: dict[str, int]) -> None:
    model = make()
    fusedops.patch(model)
    with counted() as calls:
        model(INPUT)
    assert calls == expected


def test_a_linear_layer_alone_stays_with_torch_where_that_is_as_fast() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.Tanh()).double()
    report = fusedops.patch(model)
    assert not report["0"].replaced
    assert "as fast" in report["0"].reason
    with counted() as calls:
        model(INPUT.double())
    assert not calls


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


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_hook_in_a_sequence_fires(position: int) -> None:
    patched, stock = patched_pair(feed_forward(nn.GELU()))
    for model in (patched, stock):
        model[position].register_forward_hook(lambda module, args, output: output * 2)
    assert_close(patched(INPUT), stock(INPUT))


def test_a_sequence_that_changes_later() -> None:
    patched, stock = patched_pair(feed_forward(nn.GELU()))
    for model in (patched, stock):
        model.append(nn.Tanh())
        model[1] = nn.Tanh()
    assert_close(patched(INPUT), stock(INPUT))
    assert len(patched[:2]) == 2


def test_subclasses_are_not_touched() -> None:
    class Mine(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    report = fusedops.patch(nn.ModuleList([Mine(32), nn.LayerNorm(32)]))
    assert [entry.replaced for entry in report.modules] == [False, True]


def test_an_overridden_forward_is_kept() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32))
    model[0].forward = lambda input: input
    report = fusedops.patch(model)
    assert report["0"].reason == "its forward is overridden on the instance"
    assert report["1"].replaced


class _Quantised(torch.Tensor):
    """A weight that answers torch's functions itself, as quantisation libraries make them."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                return func(args[0], 2 * args[1], *args[2:])
            return func(*args, **(kwargs or {}))


def test_a_weight_that_answers_for_itself_is_asked() -> None:
    model = feed_forward(nn.GELU())
    for linear in (model[0], model[2]):
        weight = linear.weight.detach().as_subclass(_Quantised)
        del linear.weight
        linear.weight = weight
    expected = model(INPUT)
    report = fusedops.patch(model)
    assert "_Quantised" in report["0"].reason
    assert_close(model(INPUT), expected)


def test_encoder_layer_in_training_and_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
    patched, stock = patched_pair(layer)
    batch = INPUT.view(4, 5, 32)
    dtypes = {patched: torch.float32, stock: torch.float32}
    assert_same_training(
        patched, stock, lambda model: model(batch.to(dtypes.get(model, torch.float64))).mean()
    )
    with torch.no_grad():
        assert_close(patched.eval()(batch), stock.eval()(batch))


def test_half_precision_model() -> None:
    patched, stock = patched_pair(nn.Sequential(nn.LayerNorm(32), *feed_forward(nn.GELU())))
    batch = INPUT.bfloat16()
    truth = stock.double()(batch.double())
    eager, actual = stock.bfloat16()(batch), patched.bfloat16()(batch)
    assert actual.dtype == torch.bfloat16
    eager_error = (eager.double() - truth).norm()
    assert (actual.double() - truth).norm() <= 2 * eager_error


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


def test_own_modules_survive_unpatch() -> None:
    model = nn.Sequential(fusedops.nn.LayerNorm(32), nn.LayerNorm(32))
    fusedops.patch(model)
    fusedops.unpatch(model)
    assert type(model[0]) is fusedops.nn.LayerNorm
    assert type(model[1]) is nn.LayerNorm


def test_products_that_torch_computes_faster_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_modules, "_SERVED", (torch.bfloat16,))
    layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)
    model = nn.Sequential(*layers)
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    expected = model(x)
    report = fusedops.patch(model, level="O3", strict=True)
    assert report.counts == {"gelu": 1, "layer_norm": 1}
    assert report["0"].reason == "torch's own product is as fast here"
    fusedops.reset_counters()
    torch.testing.assert_close(model(x), expected)
    assert called_ops() == {"gelu", "layer_norm"}
    with torch.autocast("cpu", torch.bfloat16):
        fusedops.reset_counters()
        model(x)
        assert called_ops() >= {"mlp", "layer_norm"}


def called_ops() -> set[str]:
    return {op for op, _ in fusedops.counters()}


def test_works_without_transformers() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, fusedops\n"
        "model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)).bfloat16()\n"
        "assert fusedops.patch(model).num_replaced == 2\n"
        "model(torch.ones(16, 8).bfloat16()); assert fusedops.counters()\n"
        "fusedops.unpatch(model); assert type(model[0]) is torch.nn.LayerNorm\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_import_does_not_load_transformers() -> None:
    program = (
        "import sys, torch, fusedops\n"
        "fusedops.patch(torch.nn.LayerNorm(8))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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
    for actual, expected in zip(*values, strict=True):
        assert_close(actual, expected)
    images = INPUT.view(2, 10, 4, 8)
    if stock.weight is None and stock.reduction != "none":
        pixels = TARGET[:16].remainder(10).repeat(4).view(2, 4, 8)
        assert torch.equal(patched(images, pixels), stock(images, pixels))


def test_class_weights_are_reported() -> None:
    model = nn.ModuleList([nn.CrossEntropyLoss(torch.ones(4)), nn.CrossEntropyLoss()])
    report = fusedops.patch(model)
    assert (report["0"].reason, report["1"].op) == ("it has class weights", "cross_entropy")
    fusedops.unpatch(model)
    assert type(model[1]) is nn.CrossEntropyLoss


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


def test_reports_say_the_true_reason() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    report = fusedops.patch(nn.ModuleList([nn.MultiheadAttention(8, 2), Norm(), _Derived(8, 8)]))
    expected = "MultiheadAttention reads its parameters and does not call it"
    assert report["0.out_proj"].reason == expected
    assert report["1"].reason == "there is no rule for this class"
    assert report["2"].reason == "it is derived from Linear, and the rule is for Linear itself"


class _Derived(nn.Linear):
    """It may compute another thing than ``nn.Linear`` one day."""


def test_a_layer_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_transformer.known_code, "known_as", lambda *args: None)
    layer = nn.TransformerEncoderLayer
    rule = torch_transformer._rule(layer, torch_transformer._EncoderLayer, layer.forward, ())
    plan = rule.current_plan(layer(8, 2))
    assert plan.reason == "this torch has another TransformerEncoderLayer, whose code is not known"
