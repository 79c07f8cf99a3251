"""Quantised layers: the packed layout, exactness, models, adapters and refusals."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits
from torch import nn

import fusedops
from fusedops.models import Transformer, preset
from fusedops.nn import LinearAct, QuantizedLinear
from fusedops.nn.quantized_linear import QuantizedMLP
from fusedops.ops import _quantized_weights as packed

FORMATS = tuple(packed.FORMATS)
# Place of input k of an output in its lane of 32 bits: the layout of 4 bits, written out.
NIBBLES = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


def linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(in_features + out_features)
    return nn.Linear(in_features, out_features, bias)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (33, 101), (1, 1), (5, 0), (0, 8)])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_survive_packing(format: str, outputs: int, inputs: int) -> None:
    high = 256 if format == "int8" else 16
    codes = torch.randint(high, (outputs, inputs), dtype=torch.uint8)
    qweight = packed.pack(codes, format)
    assert torch.equal(packed.unpack(qweight, format, outputs, inputs), codes)
    for n, k in itertools.product(range(outputs), range(inputs)):
        if format == "int8":
            code = int(qweight[n // 16, k // 4, k % 4 * 16 + n % 16])
        else:
            lane = qweight[n // 16, k // 8, 4 * (n % 16) : 4 * (n % 16) + 4].tolist()
            code = int.from_bytes(bytes(lane), "little") >> 4 * NIBBLES[k % 8] & 15
        assert code == codes[n, k]


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_rounded_to_the_nearest_code(format: str, group: int) -> None:
    source = linear(101, 33)
    layer = QuantizedLinear.of(source, format=format, group=group)
    weight, got = source.weight.detach(), layer.dequantize(torch.float64)
    scales_NG = layer.scales.double().transpose(1, 2).flatten(0, 1)[:33]
    scale_NK = torch.stack([scales_NG[:, k // group if group else 0] for k in range(101)], 1)
    all_codes = torch.arange(256 if format == "int8" else 16, dtype=torch.uint8)
    values = packed.values_of(all_codes, format).double()
    nearest = (weight.double()[..., None] - scale_NK[..., None] * values).abs().amin(-1)
    # The quotient is rounded in float32: near the middle of two codes either is right.
    slack = torch.finfo(torch.float32).eps * weight.abs().max().double() * 256
    assert bool(((got - weight).abs() <= nearest + slack).all())


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 11, 32, 33, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_results_and_gradients_are_those_of_the_dequantised_weight(
    format: str, dtype: torch.dtype, rows: int
) -> None:
    layer = QuantizedLinear.of(linear(101, 67), format=format, group=32).to(dtype)
    x = torch.randn(rows, 101).to(dtype).requires_grad_()
    dy = torch.randn(rows, 67).to(dtype)
    y = layer(x)
    assert layer.bias is not None
    got = [y, *torch.autograd.grad(y, (x, layer.bias), dy)]

    def by_torch(kind: torch.dtype) -> list[torch.Tensor]:
        leaf, bias = (t.detach().to(kind).requires_grad_() for t in (x, layer.bias))
        output = nn.functional.linear(leaf, layer.dequantize(kind), bias)
        return [output, *torch.autograd.grad(output, (leaf, bias), dy.to(kind))]

    for mine, eager, truth in zip(got, by_torch(dtype), by_torch(torch.float64), strict=True):
        assert_close(mine, truth, eager, depth=101)


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_has_codes_and_scales(format: str) -> None:
    layer = QuantizedLinear.of(linear(72, 20), format=format, group=24)
    other = QuantizedLinear(72, 20, format=format, group=24)
    other.load_state_dict(layer.state_dict())
    assert_same_bits(other(torch.ones(3, 72)), layer(torch.ones(3, 72)))
    assert set(layer.state_dict()) == {"qweight", "scales", "bias"}


def test_casts_of_a_module_leave_the_weight() -> None:
    layer = QuantizedLinear.of(linear(64, 16))
    before = layer.dequantize()
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        assert_same_bits(layer.to(dtype).dequantize(), before)
        assert layer.bias is not None and layer.bias.dtype == dtype
    assert_same_bits(copy.deepcopy(layer).dequantize(), before)


def test_the_weight_of_a_layer_cannot_be_misread() -> None:
    layer = QuantizedLinear.of(linear(64, 16))
    assert isinstance(layer, nn.Linear)
    with pytest.raises(TypeError):
        nn.functional.linear(torch.ones(1, 64), layer.weight, layer.bias)


class Block(nn.Module):
    """A gated feed-forward layer, an attention of torch and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.attention = nn.MultiheadAttention(64, 4)
        self.gate = nn.Linear(64, 4)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        hidden = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        output: torch.Tensor = self.head(self.down_proj(hidden))
        return output


def test_a_report_says_what_was_quantised_and_what_was_not() -> None:
    model = Block()
    before = {name: value.clone() for name, value in model.named_parameters()}
    report = fusedops.quantize(model, "int8", group=64)
    assert [entry.name for entry in report.quantized] == ["gate_proj", "up_proj", "down_proj"]
    reasons = {entry.name: entry.reason for entry in report.kept}
    assert reasons["embedding.weight"] == "tied to embedding"
    assert reasons["attention.out_proj.weight"] == "MultiheadAttention reads its weight"
    assert "gate.weight" not in {entry.name for entry in report.quantized}
    for entry in report.quantized:
        layer, weight = model.get_submodule(entry.name), before[f"{entry.name}.weight"]
        assert isinstance(layer, QuantizedLinear)
        error = (layer.dequantize() - weight).norm() / weight.norm()
        assert entry.error == pytest.approx(error.item())
        assert entry.bytes_after == layer.qweight.nbytes + layer.scales.nbytes
    assert report.worst is not None and report.worst.name in str(report)
    assert "MiB before" in str(report)


def test_adapters_on_quantised_layers_train() -> None:
    base = QuantizedLinear.of(linear(64, 48, bias=False), format="nf4", group=64)
    down, up = nn.Parameter(torch.randn(8, 64) / 8), nn.Parameter(torch.randn(48, 8) / 8)
    x = torch.randn(20, 64, requires_grad=True)

    def loss(layer: Any) -> torch.Tensor:
        return (layer(x) + x @ down.T @ up.T).square().mean()

    stock = nn.Linear(64, 48, bias=False)
    stock.weight = nn.Parameter(base.dequantize(), requires_grad=False)
    got = torch.autograd.grad(loss(base), (x, down, up))
    want = torch.autograd.grad(loss(stock), (x, down, up))
    stock.double()
    x, down, up = (t.detach().double().requires_grad_() for t in (x, down, up))
    truth = torch.autograd.grad(loss(stock), (x, down, up))
    for mine, eager, exact in zip(got, want, truth, strict=True):
        assert_close(mine, exact, eager, depth=64 * 48)


def test_patch_leaves_quantised_layers_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64))
    fusedops.quantize(model, "int8")
    x = torch.randn(3, 64)
    before = model(x)
    report = fusedops.patch(model)
    assert report["0"].reason and not report["0"].replaced
    with pytest.raises(ValueError, match="unpatch"):
        fusedops.quantize(model)
    assert_close(model(x), before.double(), before, depth=96)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_a_transformer_computes_with_its_dequantised_weights(name: str) -> None:
    torch.manual_seed(0)
    stock = Transformer(preset(name)).eval()
    model = copy.deepcopy(stock)
    report = fusedops.quantize(model, "int8", group=32, head="int8")
    assert len(report.quantized) > 4
    pairs = dict(model.named_modules())
    for path, module in pairs.items():
        if isinstance(module, QuantizedMLP):
            mlp = stock.get_submodule(path)
            mlp.w1.data, mlp.w2.data = module.up.dequantize(), module.down.dequantize()
        elif isinstance(module, QuantizedLinear) and path != "head.quantized":
            target = dict(stock.named_modules()).get(path)
            if isinstance(target, LinearAct):
                target.weight.data = module.dequantize()
    tokens = torch.arange(12).reshape(1, 12)
    want: torch.Tensor = stock.layers(
        stock.embedding(tokens, stock.make_context(tokens)), stock.make_context(tokens)
    )[0]
    got = model.layers(
        model.embedding(tokens, model.make_context(tokens)), model.make_context(tokens)
    )[0]
    wide = copy.deepcopy(stock).double()
    context = wide.make_context(tokens)
    truth = wide.layers(wide.embedding(tokens, context), context)[0]
    assert_close(got, truth, want, depth=1024)
    assert model.head.quantized is not None
    logits = model.head.quantized(got)
    weight = model.head.quantized.dequantize(torch.float64)
    eager = nn.functional.linear(got, weight.float())
    assert_close(logits, got.double() @ weight.T, eager, depth=got.shape[-1])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-bert"])
def test_joined_projections_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(preset(name)).eval()
    other, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    other.join_projections()
    names = {path.rpartition(".")[2] for path, _ in other.named_modules()}
    assert "query_key_value" in names and not {"query", "gate_proj"} & names
    tokens = torch.arange(12).reshape(2, 6)
    assert_close(other(tokens), wide(tokens), model(tokens), depth=1024)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weights": "int3"}, ValueError, "weights must be"),
        ({"group": 12}, ValueError, "multiple of 8"),
        ({"skip": "head"}, TypeError, "list of patterns"),
        ({"head": "int8"}, ValueError, "head must be None"),
        ({"skip": ["*"]}, ValueError, "no layer"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fusedops.quantize(nn.Sequential(nn.Linear(64, 16)), **change)


def test_weights_that_are_not_finite_are_refused() -> None:
    layer = linear(8, 4)
    layer.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite weight"):
        QuantizedLinear.of(layer)
