"""Modules whose own code calls torch's attention, and torch's own transformer layers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from home_made import WIDTH, LitgptAttention, NanoGPTAttention, OneHeadOfKeys
from patch_testing import assert_same_training, counted, gradients
from torch import nn

import fusedops

OPTIONS: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
PADDING = torch.zeros(2, 12)
PADDING[0, 9:] = -torch.inf
CAUSAL = nn.Transformer.generate_square_subsequent_mask(12)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x, x, x, **self.options)[0]
        return result


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x.roll(1, 1), tgt_mask=CAUSAL, tgt_is_causal=True)


# Name -> module, and how often ops run in a forward.
MODULES: dict[str, tuple[Any, dict[str, int]]] = {
    "nanogpt": (NanoGPTAttention, {"attention": 1}),
    "litgpt": (LitgptAttention, {"attention": 1}),
    "one head of keys": (OneHeadOfKeys, {"attention": 1}),
    "multi-head": (lambda: SelfAttention(need_weights=False), {"attention": 1}),
    "multi-head, masks": (
        lambda: SelfAttention(need_weights=False, attn_mask=CAUSAL, key_padding_mask=PADDING),
        {"attention": 1},
    ),
    "multi-head, causal mask": (
        lambda: SelfAttention(need_weights=False, attn_mask=CAUSAL.isinf()),
        {"attention": 1},
    ),
    "multi-head, causal": (
        lambda: SelfAttention(need_weights=False, attn_mask=CAUSAL, is_causal=True),
        {"attention": 1},
    ),
    "weights wanted": (SelfAttention, {"attention": 0}),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 48, activation="gelu", **OPTIONS),
        {"attention": 1, "mlp": 1, "add_layer_norm": 2, "layer_norm": 0},
    ),
    "encoder, norm first": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 48, norm_first=True, **OPTIONS),
            2,
            enable_nested_tensor=False,
        ),
        {"attention": 2, "mlp": 2, "add_layer_norm": 2, "layer_norm": 2},
    ),
    "decoder layer": (
        lambda: Decoder(WIDTH, 4, 48, **OPTIONS),
        {"attention": 2, "layer_norm": 3},
    ),
    "decoder": (
        lambda: Twice(nn.TransformerDecoderLayer(WIDTH, 4, 48, **OPTIONS)),
        {"attention": 2, "mlp": 1, "add_layer_norm": 3, "layer_norm": 0},
    ),
    "decoder, norm first": (
        lambda: Twice(nn.TransformerDecoderLayer(WIDTH, 4, 48, norm_first=True, **OPTIONS)),
        {"attention": 2, "mlp": 1, "add_layer_norm": 2, "layer_norm": 1},
    ),
    "encoder layer, masks": (
        lambda: Padded(WIDTH, 4, 48, **OPTIONS),
        {"attention": 1, "mlp": 1, "add_layer_norm": 2},
    ),
}


class Padded(nn.Module):
    """An encoder layer that gets boolean masks."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(*sizes, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x, CAUSAL.isinf(), PADDING.bool())
        return result


each_module = pytest.mark.parametrize("name", MODULES)


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x, x.roll(1, 1), tgt_mask=CAUSAL, tgt_is_causal=True)
        return result


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(MODULES[name][0]())
    fusedops.patch(modules[0], level="O3")
    return modules[0], modules[1]


def rows() -> torch.Tensor:
    return torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(module: nn.Module) -> torch.Tensor:
    x = rows().to(next(module.parameters()).dtype)
    return (module(x).float() * rows().roll(1, 0)).sum()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@each_module
@pytest.mark.usefixtures("own_products")
def test_training_matches_stock(name: str, autocast: bool) -> None:
    patched, stock = pair(name)
    with counted() as calls:
        loss(patched)
    expected = MODULES[name][1]
    assert {op: calls[op] for op in expected} == expected
    if name.endswith("masks") and not autocast:
        torch.testing.assert_close(gradients(patched, loss), gradients(stock, loss))
    elif not name.endswith("masks"):  # a float64 model would need float64 masks
        assert_same_training(patched, stock, loss, autocast=autocast, draws=4)


@each_module
def test_evaluation_matches_stock(name: str) -> None:
    patched, stock = pair(name)
    with torch.no_grad():
        torch.testing.assert_close(patched.eval()(rows()), stock.eval()(rows()))


# Stock is not one graph with a padding mask: torch checks the mask's values.
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("masks")])
def test_one_graph_has_the_fused_attention(name: str) -> None:
    patched, stock = pair(name)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with counted() as calls:
        torch.testing.assert_close(compiled(rows()), stock(rows()))
    assert calls["attention"] == MODULES[name][1]["attention"]


@each_module
def test_pickled_and_unpatched(name: str) -> None:
    patched, stock = pair(name)
    loaded = pickle.loads(pickle.dumps(patched)) if name != "decoder layer" else patched
    assert torch.equal(loaded(rows()), patched(rows()))
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(module) for module in stock.modules()
    ]
    assert torch.equal(patched(rows()), stock(rows()))


@pytest.mark.parametrize("name", ["nanogpt", "multi-head"])
def test_the_attention_of_plain_code_needs_level_o3(name: str) -> None:
    module = MODULES[name][0]()
    report = fusedops.patch(module, level="O2")
    with counted() as calls:
        module(rows())
    assert calls["attention"] == 0
    assert "from level O3 on" in str(report)


@pytest.mark.parametrize("name", ["nanogpt", "multi-head"])
def test_another_attention_in_torchs_place_is_called(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    patched, _ = pair(name)
    called = []
    torchs = F.scaled_dot_product_attention

    def other(*args: Any, **options: Any) -> torch.Tensor:
        called.append(1)
        return torchs(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    patched(rows())
    assert called == [1]
    assert "F.scaled_dot_product_attention was replaced" in str(fusedops.describe(patched))


def test_other_modules_keep_torchs_attention() -> None:
    pair("nanogpt")
    with counted() as calls:
        NanoGPTAttention()(rows())
        nn.MultiheadAttention(WIDTH, 4)(rows(), rows(), rows(), need_weights=False)
    assert calls["attention"] == 0


def test_dropout_of_the_attention_drops() -> None:
    module = NanoGPTAttention(0.9)
    fusedops.patch(module, level="O3")
    outputs = [module(rows()) for _ in range(2)]
    assert not torch.equal(*outputs)
    assert torch.equal(module.eval()(rows()), module(rows()))
