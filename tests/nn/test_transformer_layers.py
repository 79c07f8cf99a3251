"""MultiheadAttention and the transformer layers: torch's module samples, checkpoints, dropout."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import dtypes
from fusedops.specs import tensors_in

PAIRS = {
    nn.MultiheadAttention: fusedops.nn.MultiheadAttention,
    nn.TransformerEncoderLayer: fusedops.nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer: fusedops.nn.TransformerDecoderLayer,
}
INFOS = [info for info in module_db if info.module_cls in PAIRS]


def run(module: nn.Module, call: Any, dtype: torch.dtype, **more: Any) -> list[torch.Tensor]:
    """Return outputs and the parameters' gradients."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)

    given = pytree.tree_map_only(torch.Tensor, convert, (call.args, call.kwargs | more))
    outputs = tensors_in(module(*given[0], **given[1]))
    total = sum(
        (each.double() * torch.linspace(-1, 1, each.numel()).view_as(each)).sum()
        for each in outputs
        if each.requires_grad
    )
    grads = torch.autograd.grad(total, list(module.parameters()), allow_unused=True)
    return [output.detach() for output in (*outputs, *grads) if output is not None]


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
@pytest.mark.parametrize(
    ("training", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float64)]
)
def test_torchs_own_module_samples(info: Any, training: bool, dtype: torch.dtype) -> None:
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    compared = 0
    for sample in inputs:
        arguments = sample.constructor_input
        stock = info.module_cls(*arguments.args, **arguments.kwargs).train(training)
        ours = PAIRS[info.module_cls](*arguments.args, **arguments.kwargs).train(training)
        ours.load_state_dict(stock.state_dict())
        stock.load_state_dict(ours.state_dict())
        if training and any(each.p for each in stock.modules() if isinstance(each, nn.Dropout)):
            for module in (stock, ours):
                _without_dropout(module)
        attends = info.module_cls is nn.MultiheadAttention
        for more in [{"need_weights": False}, {}] if attends else [{}]:
            call = sample.forward_input
            exact = run(stock.double(), call, torch.float64, **more)
            eager = run(stock.to(dtype), call, dtype, **more)
            got = run(ours.to(dtype), call, dtype, **more)
            stock.float()
            for mine, base, want in zip(got, eager, exact, strict=True):
                # torch gives NaN to a query that may attend nothing.
                known = ~base.isnan()
                budget = dtypes.error_budget(base, want, dtype, depth=4096)
                error = (mine.double() - want).abs()
                assert mine.shape == want.shape
                assert not ((error > budget) & known).any(), (info.name, sample.desc)
            compared += 1
    assert compared > 3


def _without_dropout(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        if isinstance(each, nn.MultiheadAttention):
            each.dropout = 0.0


@pytest.mark.parametrize("stock", list(PAIRS), ids=lambda cls: cls.__name__)
def test_arguments_initialisation_and_state_dict_are_torchs(stock: type[nn.Module]) -> None:
    names = list(inspect.signature(stock.forward).parameters)
    assert list(inspect.signature(PAIRS[stock].forward).parameters) == names
    modules = []
    for cls in (stock, PAIRS[stock]):
        torch.manual_seed(4)
        modules.append(cls(16, 4))
    first, second = (module.state_dict() for module in modules)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert isinstance(modules[1], stock)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU(), nn.Tanh()])
def test_the_layer_runs_on_fused_ops(norm_first: bool, activation: Any) -> None:
    layer = fusedops.nn.TransformerEncoderLayer(
        16, 4, 32, 0.0, activation, batch_first=True, norm_first=norm_first
    )
    fusedops.reset_counters()
    layer(torch.randn(2, 5, 16)).sum().backward()
    ran = {op for op, _ in fusedops.counters()}
    assert {"attention", "attention_backward", "add_layer_norm"} <= ran
    assert ("mlp" in ran) == (not isinstance(activation, nn.Tanh))


def test_dropout_acts_in_training_only() -> None:
    layer = fusedops.nn.TransformerDecoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    assert not torch.equal(layer(x, memory), layer(x, memory))
    layer.eval()
    assert torch.equal(layer(x, memory), layer(x, memory))


def test_the_causal_hint_equals_the_mask() -> None:
    module = fusedops.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    by_mask, _ = module(x, x, x, need_weights=False, attn_mask=mask)
    by_hint, _ = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)
    budget = dtypes.error_budget(by_mask, by_hint.double(), torch.float32, depth=64)
    assert ((by_mask - by_hint).abs() <= budget).all()
