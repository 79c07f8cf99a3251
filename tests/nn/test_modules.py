"""The modules: torch's arguments, parameters and results, and refusals of wrong values.

Torch's own constructors word the errors of what ``MultiheadAttention`` and the transformer layers
are made of; nested tensors are theirs as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close, assert_close
from torch import nn
from wrong_values import complaints_about

import fusedops
from fusedops._core.activation import ACTIVATIONS

INPUT = torch.linspace(-2, 2, 5 * 32).view(5, 32)
Make = Callable[[], nn.Module]


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def seeded(make: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return make(*args, **options)


def llama_mlp(bias: bool, activation: str) -> nn.Module:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=32, intermediate_size=88, mlp_bias=bias, hidden_act=activation
    )
    return llama.LlamaMLP(config)


# Label -> module, what it is compared with, words of its repr.
STOCK: dict[str, tuple[Make, Make, str]] = {
    "LayerNorm": (
        lambda: fusedops.nn.LayerNorm(32, eps=0.1),
        lambda: nn.LayerNorm(32, eps=0.1),
        "eps=0.1",
    ),
    "RMSNorm": (
        lambda: fusedops.nn.RMSNorm(32, eps=0.1, rounding="hf"),
        lambda: nn.RMSNorm(32, eps=0.1),
        "weight_offset=0.0, rounding='hf'",
    ),
    **{
        f"LinearAct {name}": (
            lambda name=name: fusedops.nn.LinearAct(32, 8, activation=name),
            lambda function=function: nn.Sequential(nn.Linear(32, 8), Function(function)),
            f"activation={name!r}",
        )
        for name, function in ACTIVATIONS.items()
    },
    **{
        f"MLP {keeps or 'plain'} {bias}": (
            lambda bias=bias, keeps=keeps: fusedops.nn.MLP(
                32, 48, 8, bias, activation="gelu", **({keeps: True} if keeps else {})
            ),
            lambda bias=bias: nn.Sequential(
                nn.Linear(32, 48, bias), nn.GELU(), nn.Linear(48, 8, bias)
            ),
            f"{keeps}=True" if keeps else "",
        )
        for keeps in ("", "recompute", "keep_hidden")
        for bias in (False, True)
    },
    **{
        f"GatedMLP {ours} {bias}": (
            lambda ours=ours, bias=bias: fusedops.nn.GatedMLP(32, 88, activation=ours, bias=bias),
            lambda theirs=theirs, bias=bias: llama_mlp(bias, theirs),
            "intermediate_size=88",
        )
        for ours, theirs in (("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"))
        for bias in (False, True)
    },
}


def results(module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output and the gradients of the input and the parameters."""
    leaf = INPUT.to(dtype).requires_grad_()
    output = module.to(dtype)(leaf)
    leaves = [leaf, *module.parameters()]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label", STOCK)
def test_values_and_gradients_are_the_stock_modules(label: str, dtype: torch.dtype) -> None:
    make, make_stock, words = STOCK[label]
    module, stock = seeded(make), seeded(make_stock)
    assert words in repr(module)
    for ours, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours, theirs), "initialised as the stock module is"
        if label.endswith("Norm"):  # which begins with ones and zeros
            theirs.data += torch.linspace(-1, 1, 32)
            ours.data.copy_(theirs)
    got, eager = results(module, dtype), results(stock, dtype)
    assert all(grad.any() for grad in got)
    assert_all_close(got, results(stock, torch.float64), eager, depth=5 * 88)


def test_checkpoints_fit() -> None:
    module, stock = fusedops.nn.GatedMLP(32, 88, bias=True), llama_mlp(True, "silu")
    module.load_state_dict(stock.state_dict())
    stock.load_state_dict(module.state_dict())
    assert list(fusedops.nn.MLP(32, 48).state_dict()) == ["w1", "b1", "w2", "b2"]
    assert list(fusedops.nn.MLP(32, 48, bias=False).state_dict()) == ["w1", "w2"]
    assert fusedops.nn.MLP(32, 48).out_features == 32


@pytest.mark.parametrize(
    ("ours", "torchs", "size", "switch"),
    [
        (fusedops.nn.LayerNorm, nn.LayerNorm, (32,), "bias"),
        (fusedops.nn.AddLayerNorm, nn.LayerNorm, (32,), "bias"),
        (fusedops.nn.RMSNorm, nn.RMSNorm, (32,), "elementwise_affine"),
        (fusedops.nn.AddRMSNorm, nn.RMSNorm, (32,), "elementwise_affine"),
        (fusedops.nn.LinearAct, nn.Linear, (32, 8), "bias"),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_arguments_and_parameters_are_torchs(
    ours: type[nn.Module], torchs: type[nn.Module], size: tuple[int, ...], switch: str, on: bool
) -> None:
    positional = [
        name
        for name, parameter in inspect.signature(ours).parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional == list(inspect.signature(torchs).parameters)
    module, stock = (seeded(make, *size, **{switch: on}) for make in (ours, torchs))
    assert list(module.state_dict()) == list(stock.state_dict())
    for name, value in stock.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    module.load_state_dict(stock.state_dict())
    stock.load_state_dict(module.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: fusedops.nn.AddLayerNorm(32, **options),
        lambda **options: fusedops.nn.GatedMLP(32, 88, bias=True, **options),
        lambda **options: fusedops.nn.LayerNorm(32, **options),
        lambda **options: fusedops.nn.LinearAct(32, 8, **options),
        lambda **options: fusedops.nn.MoE(32, 20, 6, 2, **options),
        lambda **options: fusedops.nn.RMSNorm(32, **options),
    ],
)
def test_device_and_dtype_reach_the_parameters(make: Callable[..., nn.Module]) -> None:
    parameters = list(make(device="meta", dtype=torch.bfloat16).parameters())
    assert parameters
    assert all(each.is_meta and each.dtype == torch.bfloat16 for each in parameters)


def test_norms_are_torchs_classes() -> None:
    assert isinstance(fusedops.nn.LayerNorm(4), nn.LayerNorm)
    assert isinstance(fusedops.nn.RMSNorm(4), nn.RMSNorm)


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


@pytest.mark.parametrize(
    ("make", "mentions"),
    [
        (lambda: fusedops.nn.MLP(2, 2, recompute=True, keep_hidden=True), "MLP: keep_hidden"),
        (lambda: fusedops.nn.AddLayerNorm(2, dropout_p=1.5), "AddLayerNorm: dropout_p"),
    ],
)
def test_wrong_arguments_are_named(make: Make, mentions: str) -> None:
    with pytest.raises(ValueError, match=mentions):
        make()


CONSTRUCTORS: dict[str, tuple[Any, ...]] = {
    "AddLayerNorm": (8,),
    "AddRMSNorm": (8,),
    "BalancingBias": (4,),
    "CrossEntropyLoss": (),
    "Dropout": (0.5,),
    "GatedMLP": (8, 16),
    "LayerNorm": (8,),
    "LinearAct": (8, 16),
    "LinearCrossEntropyLoss": (8, 16),
    "MLP": (8, 16),
    "MoE": (8, 16, 4, 2),
    "QuantizedLinear": (8, 8),
    "RMSNorm": (8,),
}
NUMBERS_AS_TORCH = ("eps",)
OF_TORCH = {"MultiheadAttention", "TransformerDecoderLayer", "TransformerEncoderLayer"}
X = torch.linspace(-1, 1, 24).view(3, 8)
TARGET = torch.tensor([0, 3, 1])
IDS = torch.tensor([[1, 0], [1, 2], [3, 0]])
PLAN = fusedops.RoutingPlan.from_choices(IDS, torch.full((3, 2), 0.5), 4)
MASK = torch.zeros(3, 3, dtype=torch.bool)

# Module -> arguments of a forward that is right, and the op whose name messages may begin with.
FORWARDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "AddLayerNorm": ((X, X), {}, "add_layer_norm"),
    "AddRMSNorm": ((X, X), {}, "add_rms_norm"),
    "CrossEntropyLoss": ((X, TARGET), {}, "cross_entropy"),
    "Dropout": ((X,), {}, "bias_dropout_add"),
    "GatedMLP": ((X,), {}, "linear_glu"),
    "LayerNorm": ((X,), {}, "layer_norm"),
    "LinearAct": ((X,), {}, "linear_act"),
    "LinearCrossEntropyLoss": ((X, TARGET), {}, "linear_cross_entropy"),
    "MLP": ((X,), {}, "mlp"),
    "MoE": ((X,), {"plan": PLAN}, "moe_mlp"),
    "MultiheadAttention": ((X, X, X), {"need_weights": False, "attn_mask": MASK}, ""),
    "QuantizedLinear": ((X,), {}, "quantized_linear"),
    "RMSNorm": ((X,), {}, "rms_norm"),
    "TransformerDecoderLayer": ((X, X), {"tgt_mask": MASK, "memory_mask": MASK}, ""),
    "TransformerEncoderLayer": ((X,), {"src_mask": MASK}, ""),
}


def test_every_module_is_tested() -> None:
    assert {*CONSTRUCTORS} | OF_TORCH == set(fusedops.nn.__all__)
    assert {*FORWARDS} | {"BalancingBias"} == set(fusedops.nn.__all__)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_refuse_wrong_values(name: str) -> None:
    module = getattr(fusedops.nn, name)
    complaints = complaints_about(
        module, name, CONSTRUCTORS[name], {}, takes_any_number=NUMBERS_AS_TORCH
    )
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_refuse_wrong_values(name: str) -> None:
    made = CONSTRUCTORS.get(name, (8, 2))
    module = getattr(fusedops.nn, name)(*made).eval()
    args, kwargs, op = FORWARDS[name]
    complaints = complaints_about(
        module.forward, (name, op or name), args, kwargs, nested=name not in OF_TORCH
    )
    assert not complaints, "\n".join(complaints)
