"""GatedMLP is Hugging Face's LlamaMLP: values, gradients, and checkpoints both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedops
from fusedops._core import dtypes

llama = pytest.importorskip("transformers.models.llama.modeling_llama")

SIZES = (32, 88)


def _stock(bias: bool, activation: str = "silu") -> nn.Module:
    from transformers import LlamaConfig

    hidden, intermediate = SIZES
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        mlp_bias=bias,
        hidden_act=activation,
        num_attention_heads=4,
    )
    torch.manual_seed(3)
    return llama.LlamaMLP(config)


def _results(module: nn.Module, input: torch.Tensor) -> list[torch.Tensor]:
    leaf = input.detach().clone().requires_grad_()
    output = module(leaf)
    leaves = [leaf, *(dict(module.named_parameters())[name] for name in sorted(_names(module)))]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")]
)
def test_values_and_gradients_are_llamas(
    activation: str, theirs: str, bias: bool, dtype: torch.dtype
) -> None:
    stock = _stock(bias, theirs).to(dtype)
    module = fusedops.nn.GatedMLP(*SIZES, activation=activation, bias=bias, dtype=dtype)
    module.load_state_dict(stock.state_dict())
    input = torch.randn(2, 5, SIZES[0]).to(dtype)
    got, eager = _results(module, input), _results(stock, input)
    exact = _results(stock.double(), input.double())
    for index, (mine, base, want) in enumerate(zip(got, eager, exact, strict=True)):
        budget = dtypes.error_budget(base, want, dtype, depth=SIZES[1])
        assert ((mine.double() - want).abs() <= budget).all(), f"result {index}"


@pytest.mark.parametrize("bias", [False, True])
def test_checkpoints_load_both_ways(bias: bool) -> None:
    stock, module = _stock(bias), fusedops.nn.GatedMLP(*SIZES, bias=bias)
    assert set(module.state_dict()) == set(stock.state_dict())
    module.load_state_dict(stock.state_dict())
    other = _stock(bias)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(module.state_dict())
    for name, value in stock.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_initialises_as_llama_does_before_its_model_does() -> None:
    stock = _stock(False)
    torch.manual_seed(3)
    module = fusedops.nn.GatedMLP(*SIZES)
    for name, value in stock.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)


def test_device_and_dtype_reach_the_parameters() -> None:
    module = fusedops.nn.GatedMLP(*SIZES, bias=True, device="meta", dtype=torch.bfloat16)
    assert all(
        parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in module.parameters()
    )
    assert "intermediate_size=88" in repr(module)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="GatedMLP: activation"):
        fusedops.nn.GatedMLP(*SIZES, activation="swish")
