"""Modules without a family: of torch, of users, and with attention of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import followed_modules as followed
import home_made
import pytest
import torch
from home_made import FEED_FORWARDS, NORMS, WIDTH, SelfAttention, feed_forward
from patch_testing import assert_same_training, counted, patched_pair
from torch import nn

import fusedops
from fusedops._core import dtypes

OPTIONS: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
PADDING = torch.zeros(2, 12)
PADDING[0, 9:] = -torch.inf
CAUSAL = nn.Transformer.generate_square_subsequent_mask(12)
ROWS = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


class Padded(nn.Module):
    """An encoder layer that gets boolean masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, **OPTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x, CAUSAL.isinf(), PADDING.bool())
        return result


class CausalDecoder(nn.Module):
    """A decoder layer that attends to its input and to another one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = CAUSAL.to(x.dtype)
        result: torch.Tensor = self.layer(x, x.roll(1, 1), tgt_mask=mask, tgt_is_causal=True)
        return result


class DerivedDecoder(nn.TransformerDecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask = CAUSAL.to(x.dtype)
        return super().forward(x, x.roll(1, 1), tgt_mask=mask, tgt_is_causal=True)


class Row(NamedTuple):
    """A module, how often ops run in its forward, and the level of ``patch``."""

    make: Callable[[], nn.Module]
    ops: dict[str, int]
    level: str = "O2"


TORCH = {
    "LayerNorm": Row(lambda: nn.LayerNorm(WIDTH), {"layer_norm": 1}),
    "LayerNorm, no bias": Row(lambda: nn.LayerNorm(WIDTH, eps=0.1, bias=False), {"layer_norm": 1}),
    "LayerNorm, no weight": Row(
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), {"layer_norm": 1}
    ),
    "RMSNorm": Row(lambda: nn.RMSNorm(WIDTH), {"rms_norm": 1}),
    "Linear": Row(lambda: nn.Linear(WIDTH, 8), {"linear_act": 1}),
    "Linear, no bias": Row(lambda: nn.Linear(WIDTH, 8, bias=False), {"linear_act": 1}),
    "GELU last": Row(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU()),
        {"linear_act": 1, "layer_norm": 1, "gelu": 1},
    ),
    "GELU inside": Row(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU("tanh"), nn.LayerNorm(8)),
        {"linear_act": 1, "layer_norm": 1, "gelu": 0},
    ),
    "GELU first": Row(
        lambda: nn.Sequential(nn.GELU("tanh"), nn.LayerNorm(WIDTH)), {"gelu": 1, "layer_norm": 1}
    ),
    "MLP, GELU": Row(lambda: feed_forward(nn.GELU()), {"mlp": 1}),
    "MLP, tanh GELU": Row(lambda: feed_forward(nn.GELU("tanh")), {"mlp": 1}),
    "MLP, ReLU": Row(lambda: feed_forward(nn.ReLU()), {"mlp": 1}),
    "MLP, SiLU": Row(lambda: feed_forward(nn.SiLU()), {"mlp": 1}),
    "MLP, Tanh": Row(lambda: feed_forward(nn.Tanh()), {"mlp": 0, "linear_act": 2}),
    "MLP and more": Row(
        lambda: nn.Sequential(
            *feed_forward(nn.GELU()), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 3), nn.GELU()
        ),
        {"mlp": 1, "linear_act": 1, "gelu": 0},
    ),
    "MLP and GELU": Row(
        lambda: nn.Sequential(*feed_forward(nn.ReLU()), nn.GELU()), {"mlp": 1, "gelu": 1}
    ),
    "encoder layer, default level": Row(
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, activation="gelu", **OPTIONS),
        {"mlp": 1, "add_layer_norm": 2},
    ),
}
USERS = {
    name: Row(make, {op: 1})
    for name, (make, op) in (
        {f"norm {name}": value for name, value in NORMS.items()} | FEED_FORWARDS
    ).items()
}


def attending(make: Callable[[], nn.Module], **ops: int) -> Row:
    """Return a row with attention in plain code, which level O3 fuses."""
    return Row(make, {"attention": 1} | ops, "O3")


ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
NORM_FIRST = OPTIONS | {"norm_first": True}
MASKS = {"attn_mask": CAUSAL, "key_padding_mask": PADDING}
ATTENDING = {
    "nanogpt": attending(home_made.NanoGPTAttention),
    "litgpt attention": attending(home_made.LitgptAttention),
    "one head of keys": attending(home_made.OneHeadOfKeys),
    "rotated in float32": attending(home_made.RotatedAttention),
    "under another name": attending(lambda: followed.RenamedAttention()),
    "processor": attending(lambda: followed.ProcessorAttention(followed.Processor())),
    "multi-head": attending(lambda: SelfAttention(need_weights=False)),
    "multi-head, masks": attending(lambda: SelfAttention(need_weights=False, **MASKS)),
    "multi-head, causal mask": attending(
        lambda: SelfAttention(need_weights=False, attn_mask=CAUSAL.isinf())
    ),
    "multi-head, causal": attending(
        lambda: SelfAttention(need_weights=False, attn_mask=CAUSAL, is_causal=True)
    ),
    "weights wanted": attending(SelfAttention, attention=0),
    "encoder layer": attending(
        lambda: ENCODER(WIDTH, 4, 48, activation="gelu", **OPTIONS),
        mlp=1,
        add_layer_norm=2,
        layer_norm=0,
    ),
    "encoder, norm first": attending(
        lambda: nn.TransformerEncoder(
            ENCODER(WIDTH, 4, 48, **NORM_FIRST), 2, enable_nested_tensor=False
        ),
        attention=2,
        mlp=2,
        add_layer_norm=2,
        layer_norm=2,
    ),
    "decoder": attending(
        lambda: CausalDecoder(DECODER(WIDTH, 4, 48, **OPTIONS)),
        attention=2,
        mlp=1,
        add_layer_norm=3,
        layer_norm=0,
    ),
    "decoder, norm first": attending(
        lambda: CausalDecoder(DECODER(WIDTH, 4, 48, **NORM_FIRST)),
        attention=2,
        mlp=1,
        add_layer_norm=2,
        layer_norm=1,
    ),
    "derived decoder layer": attending(
        lambda: DerivedDecoder(WIDTH, 4, 48, **OPTIONS), attention=2, layer_norm=3
    ),
    "encoder layer, masks": attending(Padded, mlp=1, add_layer_norm=2),
}
MODULES = TORCH | USERS | ATTENDING
TRAINED = sorted(MODULES.keys() - {"norm no weight", "LayerNorm, no weight", "GELU first"})


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a patched module and a stock one; norms have other weights than ones."""
    torch.manual_seed(0)
    stock = MODULES[name].make().to(dtype)
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return patched_pair(stock, level=MODULES[name].level)


def loss(module: nn.Module) -> torch.Tensor:
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    output = module(ROWS.to(dtype))
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    return (output * torch.cos(torch.arange(output.numel())).view_as(output)).sum()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.usefixtures("own_products")
def test_training_matches_stock(name: str, autocast: bool) -> None:
    patched, stock = pair(name)
    expected = MODULES[name].ops
    draws = 16 if autocast else 3
    with counted() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss(patched)
    assert {op: calls[op] for op in expected} == expected
    assert_same_training(patched, stock, loss, autocast=autocast, draws=draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_evaluation_matches_stock(name: str, dtype: torch.dtype) -> None:
    patched, stock = pair(name, dtype)
    rows = ROWS.to(dtype)
    with torch.no_grad():
        actual, expected = patched.eval()(rows), stock.eval()(rows)
        if dtype == torch.bfloat16:
            assert_as_precise(actual, expected, stock.double()(rows.double()))
        else:
            torch.testing.assert_close(actual, expected)


def assert_as_precise(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare with eager's error; inside both round to bfloat16, whatever the result's dtype is."""
    assert actual.dtype == eager.dtype
    budget = dtypes.error_budget(eager, exact, torch.bfloat16, depth=WIDTH)
    assert ((actual.double() - exact).abs() <= budget).all()


def test_a_float32_weight_keeps_the_dtype_of_the_result() -> None:
    for name in NORMS:
        patched, stock = pair(f"norm {name}")
        rows = ROWS.bfloat16()
        try:
            expected = stock(rows)
        except RuntimeError:  # torch's own functions need one dtype
            continue
        assert_as_precise(patched(rows), expected, stock.double()(rows.double()))


# Stock is not one graph with a padding mask: torch checks the mask's values.
@pytest.mark.ci(every=3)
@pytest.mark.parametrize("name", [name for name in ATTENDING if not name.endswith("masks")])
def test_one_graph_has_the_fused_attention(name: str) -> None:
    patched, stock = pair(name)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with counted() as calls:
        torch.testing.assert_close(compiled(ROWS), stock(ROWS))
    assert calls["attention"] == MODULES[name].ops["attention"]


@pytest.mark.parametrize("name", MODULES)
def test_copied_pickled_and_unpatched(name: str) -> None:
    patched, stock = pair(name)
    for loaded in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert type(loaded) is type(patched)
        assert torch.equal(loaded(ROWS), patched(ROWS))
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(module) for module in stock.modules()
    ]
    with counted() as calls:
        assert torch.equal(patched(ROWS), stock(ROWS))
    assert not calls


@pytest.mark.parametrize("name", ["nanogpt", "multi-head", "processor"])
def test_the_attention_of_plain_code_needs_level_o3(name: str) -> None:
    module = MODULES[name].make()
    report = fusedops.patch(module, level="O2")
    with counted() as calls:
        module(ROWS)
    assert calls["attention"] == 0
    assert "from level O3 on" in str(report)


# Modules that hand their attention to a processor, as those of diffusers do.


class DerivedProcessor(followed.Processor):
    """A processor whose code calls that of its base."""

    def __call__(self, module: Any, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().__call__(module, hidden + 0.0, **options)


class AsModule(nn.Module):
    """A processor with parameters, called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return followed.Processor()(module, hidden * self.scale)


class SetsProcessor(followed.ProcessorAttention):
    """Its forward makes the processor when it runs first."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.processor is None:
            self.processor = followed.Processor()
        return self.processor(self, hidden)


TRIANGLE = torch.ones(12, 12, dtype=torch.bool).tril()


def processed_pair(processor: Any) -> tuple[nn.Module, nn.Module]:
    stock = followed.ProcessorAttention(processor)
    patched = copy.deepcopy(stock)
    patched.processor = stock.processor
    fusedops.patch(patched, level="O3")
    return patched, stock


def num_fused(module: nn.Module, **options: Any) -> int:
    with counted() as calls:
        module(ROWS, **options)
    return calls["attention"]


def test_arguments_are_chosen_by_the_signature_of_the_processor() -> None:
    def masked_loss(module: nn.Module) -> torch.Tensor:
        x = ROWS.to(next(module.parameters()).dtype)
        return (module(x, mask=TRIANGLE, other=1).float() * ROWS.roll(1, 0)).sum()

    patched, stock = processed_pair(followed.Processor())
    assert num_fused(patched, mask=TRIANGLE, other=1) == 1
    assert_same_training(patched, stock, masked_loss)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    with counted() as calls:
        torch.testing.assert_close(compiled(ROWS, mask=TRIANGLE), stock(ROWS, mask=TRIANGLE))
    assert calls["attention"] == 1


def test_a_shared_processor_stays_torchs_elsewhere() -> None:
    patched, stock = processed_pair(followed.Processor())
    patched(ROWS)
    assert type(patched.processor) is followed.Processor and patched.processor is stock.processor
    assert num_fused(stock) == 0


@pytest.mark.parametrize("make", [DerivedProcessor, followed.LinearProcessor, AsModule])
def test_another_processor_runs_as_before(make: type) -> None:
    stock = followed.ProcessorAttention(make())
    patched = copy.deepcopy(stock)
    report = str(fusedops.patch(patched, level="O3"))
    assert f"its {make.__name__} does not call F.scaled_dot_product" in report
    assert num_fused(patched) == 0
    assert torch.allclose(patched(ROWS), stock(ROWS), atol=1e-6)


def test_a_forward_that_sets_the_processor_is_kept() -> None:
    module = SetsProcessor(followed.Processor())
    fusedops.patch(module, level="O3")
    module.processor = None
    assert num_fused(module) == 0
    assert type(module.processor) is followed.Processor
