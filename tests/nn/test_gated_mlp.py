"""GatedMLP is Hugging Face's LlamaMLP: values, gradients, and checkpoints both ways."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_all_close
from torch import nn

import fusedops

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
    leaves = [leaf, *(parameter for _, parameter in sorted(module.named_parameters()))]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


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
    stock.load_state_dict(module.state_dict())
    input = torch.randn(2, 5, SIZES[0]).to(dtype)
    got, eager = _results(module, input), _results(stock, input)
    assert_all_close(got, _results(stock.double(), input.double()), eager, depth=SIZES[1])


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
