"""The modules: torch's constructor arguments, parameters and state_dict, and the op's result."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from comparing import assert_close
from torch import nn

import fusedops
from fusedops._core.activation import ACTIVATIONS

INPUT = torch.linspace(-2, 2, 5 * 32).view(5, 32)


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def assert_as_stock(module: nn.Module, stock: nn.Module) -> None:
    eager = stock(INPUT)
    assert_close(module(INPUT), stock.double()(INPUT.double()), eager, depth=INPUT.shape[-1])


def seeded(make: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
    torch.manual_seed(3)
    return make(*args, **kwargs)


@pytest.mark.parametrize(
    ("ours", "torchs", "size", "options"),
    [
        (ours, torchs, size, options)
        for ours, torchs, size, switch in (
            (fusedops.nn.LayerNorm, nn.LayerNorm, (32,), "bias"),
            (fusedops.nn.AddLayerNorm, nn.LayerNorm, (32,), "bias"),
            (fusedops.nn.RMSNorm, nn.RMSNorm, (32,), "elementwise_affine"),
            (fusedops.nn.AddRMSNorm, nn.RMSNorm, (32,), "elementwise_affine"),
            (fusedops.nn.LinearAct, nn.Linear, (32, 8), "bias"),
        )
        for options in ({switch: True}, {switch: False})
    ],
)
def test_arguments_and_parameters_are_torchs(
    ours: type[nn.Module],
    torchs: type[nn.Module],
    size: tuple[int, ...],
    options: dict[str, bool],
) -> None:
    theirs = list(inspect.signature(torchs).parameters)
    positional = [
        name
        for name, parameter in inspect.signature(ours).parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional == theirs
    module, stock = (seeded(make, *size, **options) for make in (ours, torchs))
    assert list(module.state_dict()) == list(stock.state_dict())
    for name, value in stock.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    module.load_state_dict(stock.state_dict())
    stock.load_state_dict(module.state_dict())
    half = ours(*size, **options, device="meta", dtype=torch.bfloat16)
    assert all(each.is_meta and each.dtype == torch.bfloat16 for each in half.parameters())


def test_reset_parameters_draws_as_torch_does() -> None:
    module, stock = fusedops.nn.LinearAct(32, 8), nn.Linear(32, 8)
    for each in (module, stock):
        torch.manual_seed(5)
        each.reset_parameters()
    assert torch.equal(module.weight, stock.weight)
    assert torch.equal(module.bias, stock.bias)
    norm = fusedops.nn.AddLayerNorm(4)
    with torch.no_grad():
        norm.weight.fill_(2)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(4))


@pytest.mark.parametrize("rounding", ["torch", "hf"])
def test_rms_norm(rounding: str) -> None:
    module = fusedops.nn.RMSNorm(32, eps=0.1, weight_offset=1.0, rounding=rounding)
    stock = nn.RMSNorm(32, eps=0.1)
    assert torch.equal(module.weight, torch.zeros(32))
    with torch.no_grad():
        stock.weight.copy_(torch.linspace(0, 2, 32))
        module.weight.copy_(stock.weight - 1)
    assert isinstance(module, nn.RMSNorm)
    assert_as_stock(module, stock)
    assert f"weight_offset=1.0, rounding={rounding!r}" in repr(module)


def test_layer_norm() -> None:
    module, stock = fusedops.nn.LayerNorm(32, eps=0.1), nn.LayerNorm(32, eps=0.1)
    with torch.no_grad():
        for each in (module, stock):
            each.weight.copy_(torch.linspace(0, 2, 32))
            each.bias.copy_(torch.linspace(-1, 1, 32))
    assert isinstance(module, nn.LayerNorm)
    assert_as_stock(module, stock)


@pytest.mark.parametrize(
    ("module", "stock", "words"),
    [
        (fusedops.nn.AddLayerNorm(32, dropout_p=1.0), nn.LayerNorm(32), "dropout_p=1.0"),
        (
            fusedops.nn.AddRMSNorm(32, eps=0.1, rounding="hf", dropout_p=1.0),
            nn.RMSNorm(32, eps=0.1),
            "rounding='hf', dropout_p=1.0",
        ),
    ],
    ids=["layer", "rms"],
)
def test_an_added_norm_and_its_dropout(module: nn.Module, stock: nn.Module, words: str) -> None:
    residual = INPUT.flip(0)
    assert torch.equal(module(INPUT, residual)[1], residual)
    module.eval()
    normed, summed = module(INPUT, residual)
    assert torch.equal(summed, INPUT + residual)
    eager = stock(summed)
    assert_close(normed, stock.double()(summed.double()), eager, depth=INPUT.shape[-1])
    assert words in repr(module)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_linear_act(activation: str) -> None:
    module = seeded(fusedops.nn.LinearAct, 32, 8, activation=activation)
    stock = seeded(nn.Linear, 32, 8)
    function = ACTIVATIONS[activation]
    assert_as_stock(module, nn.Sequential(stock, Function(function)))
    assert f"activation={activation!r}" in repr(module)


@pytest.mark.parametrize("keeps", [{}, {"recompute": True}, {"keep_hidden": True}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias: bool, keeps: dict[str, bool]) -> None:
    module = seeded(fusedops.nn.MLP, 32, 48, 8, bias, activation="gelu", **keeps)
    torch.manual_seed(3)
    stock = nn.Sequential(nn.Linear(32, 48, bias), nn.GELU(), nn.Linear(48, 8, bias))
    assert_as_stock(module, stock)
    assert list(module.state_dict()) == (["w1", "b1", "w2", "b2"] if bias else ["w1", "w2"])
    assert fusedops.nn.MLP(32, 48).out_features == 32
    assert all(f"{name}=True" in repr(module) for name in keeps)


def test_parameters_get_gradients() -> None:
    modules: list[nn.Module] = [
        fusedops.nn.LayerNorm(32),
        fusedops.nn.RMSNorm(32),
        fusedops.nn.LinearAct(32, 4),
        fusedops.nn.MLP(32, 8),
        fusedops.nn.MLP(32, 8, recompute=True),
        fusedops.nn.MLP(32, 8, keep_hidden=True),
    ]
    for module in modules:
        module(INPUT).square().sum().backward()
        assert all(torch.count_nonzero(parameter.grad) for parameter in module.parameters())


@pytest.mark.parametrize(
    ("make", "mentions"),
    [
        (lambda: fusedops.nn.LinearAct(2, 2, activation="gleu"), "LinearAct: activation"),
        (lambda: fusedops.nn.GatedMLP(2, 2, activation="swish"), "GatedMLP: activation"),
        (lambda: fusedops.nn.MLP(2, 2, activation="gelu_new"), "MLP: activation"),
        (lambda: fusedops.nn.MLP(2, 2, recompute=True, keep_hidden=True), "MLP: keep_hidden"),
        (lambda: fusedops.nn.AddLayerNorm(2, dropout_p=1.5), "AddLayerNorm: dropout_p"),
        (lambda: fusedops.nn.RMSNorm(2, rounding="bf16"), "RMSNorm: rounding"),
        (lambda: fusedops.nn.AddRMSNorm(2, rounding="bf16"), "AddRMSNorm: rounding"),
        (lambda: fusedops.nn.AddRMSNorm(2, dropout_p=-1.0), "AddRMSNorm: dropout_p"),
    ],
)
def test_wrong_arguments_are_named(make: object, mentions: str) -> None:
    with pytest.raises(ValueError, match=mentions):
        make()
