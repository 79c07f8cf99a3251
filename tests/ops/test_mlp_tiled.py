"""Feed-forward layers in tiles of tokens: values, gradients, memory, and who offers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_all_close
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedops
from fusedops import UnsupportedError, memory
from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.mlp_tiled import mlp_tiled
from fusedops.runtime.peak import peak_bytes

H, F, TILE = 24, 56, 7
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = pytest.mark.parametrize("backend", [None, "torch", TRITON])
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
Leaves = dict[str, Any]


def leaves(
    dtype: torch.dtype, gated: bool, rows: int = 30, transposed: bool = False, frozen: str = ""
) -> Leaves:
    """Return the tensors of a layer by their names."""
    generator = torch.Generator().manual_seed(3)

    def new(name: str, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).bfloat16().to(dtype)
        swaps = transposed and len(shape) == 2
        leaf = values.t().contiguous().t() if swaps else values
        return leaf.requires_grad_(name not in frozen.split())

    gate = {"b1": None, "up_weight": new("up_weight", F, H)} if gated else {"b1": new("b1", F)}
    weights = {"w1": new("w1", F, H), "w2": new("w2", H, F), "b2": new("b2", H)}
    return {"input": new("input", rows, H), **weights, **gate}


def tiled(given: Leaves, activation: str = "silu") -> torch.Tensor:
    return mlp_tiled(**given, activation=activation, tile_tokens=TILE)


def eager(given: Leaves, activation: str = "silu") -> torch.Tensor:
    linear, x = nn.functional.linear, given["input"]
    hidden = ACTIVATIONS[activation](linear(x, given["w1"], given["b1"]))
    if "up_weight" in given:
        hidden = hidden * linear(x, given["up_weight"])
    return linear(hidden, given["w2"], given["b2"])


def results(given: Leaves, output: torch.Tensor) -> dict[str, torch.Tensor]:
    asked = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    grads = torch.autograd.grad(output, list(asked.values()), weights.to(output.dtype))
    return {"output": output.detach(), **dict(zip(asked, grads, strict=True))}


CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "transposed": {"transposed": True},
    "no rows": {"rows": 0},
    "one row": {"rows": 1},
    "two tiles": {"rows": 2 * TILE},
    "frozen weights": {"frozen": "w1 b1 up_weight w2 b2"},
    "first frozen": {"frozen": "input w1 b1 up_weight"},
    "gate frozen": {"frozen": "w1 b1"},
}


@BACKENDS
@GATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients(
    backend: str | None, dtype: torch.dtype, gated: bool, call: str
) -> None:
    given, exact, stock = (
        leaves(each, gated, **CALLS[call]) for each in (dtype, torch.float64, dtype)
    )
    with fusedops.use_backend(backend):
        got = results(given, tiled(given))
    assert_all_close(got, results(exact, eager(exact)), results(stock, eager(stock)), depth=F)
    for name in {"w1", "up_weight", "w2"} & got.keys():
        assert got[name].stride() == given[name].stride()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_gate_differentiates_as_in_float64(activation: str) -> None:
    given = leaves(torch.float64, gated=True)
    want = results(given, eager(given, activation))
    assert_all_close(results(given, tiled(given, activation)), want, want, depth=F)


def test_second_derivatives() -> None:
    given = leaves(torch.float64, gated=True, rows=3)
    tensors = [given[name] for name in ("input", "w1", "up_weight", "w2", "b2")]

    def layer(x: Any, w1: Any, up: Any, w2: Any, b2: Any) -> torch.Tensor:
        options = {"activation": "silu", "tile_tokens": 2, "up_weight": up[:3]}
        return mlp_tiled(x, w1[:3], None, w2[:2, :3], b2[:2], **options)

    assert torch.autograd.gradcheck(layer, tensors)
    assert torch.autograd.gradgradcheck(layer, tensors)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_rounded_once(backend: str | None, dtype: torch.dtype) -> None:
    x, weight = torch.ones(64, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    grad = torch.ones(64, 1, dtype=dtype)
    grad[0] = 4096.0  # to which a sum in half precision would add nothing
    with fusedops.use_backend(backend):
        y = fusedops.mlp(x, weight, bias, weight.detach(), None, activation="relu", tile_tokens=1)
        got = torch.autograd.grad(y, [weight, bias], grad)
    want = torch.tensor(4096.0 + 63).to(dtype)
    assert [sums.item() for sums in got] == [want.item()] * 2


def test_gradients_add_to_those_that_exist_and_autocast_lowers() -> None:
    given, want = (leaves(dtype, gated=True) for dtype in (torch.float32, torch.bfloat16))
    tiled(want).sum().backward()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            output = tiled(given)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    for name in given.keys() - {"b1"}:
        assert torch.equal(given[name].grad, 2 * want[name].grad.float())


@GATED
def test_checkpointing_and_compilation_give_the_same_bits(gated: bool) -> None:
    given = leaves(torch.float32, gated)
    want = results(given, tiled(given))
    again = checkpoint(lambda: tiled(given), use_reentrant=False)
    compiled = torch.compile(tiled, backend="aot_eager", fullgraph=True)(given)
    for got in (results(given, again), results(given, compiled)):
        assert all(torch.equal(got[name], value) for name, value in want.items())


@GATED
def test_products_and_memory_of_a_step(gated: bool) -> None:
    x = torch.ones(4096, 64, requires_grad=True)
    make = fusedops.nn.GatedMLP if gated else fusedops.nn.MLP
    layers = {size: make(64, 256, tile_tokens=size) for size in (None, 256)}
    counts = {}
    for size, layer in layers.items():
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts[size] = counter.get_total_flops() / (2 * x.numel() * 256)
    assert counts == ({None: 9, 256: 11} if gated else {None: 6, 256: 7})

    def peak(size: int | None) -> int:
        return peak_bytes(lambda: layers[size](x).sum().backward(), x.device)

    assert 4 * peak(256) <= peak(None)


def llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=H, intermediate_size=F, num_attention_heads=2)
    return nn.Sequential(LlamaMLP(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "sequential": lambda: nn.Sequential(nn.Linear(H, F), nn.GELU(), nn.Linear(F, H)),
    "gated": lambda: nn.Sequential(fusedops.nn.GatedMLP(H, F)),
    "plain": lambda: nn.Sequential(fusedops.nn.MLP(H, F, keep_hidden=True)),
}


def step(model: nn.Module, *, tiles: bool) -> list[torch.Tensor]:
    """Return output and gradients; whether the layer went in tiles is compared."""
    x = torch.randn(2, 11, H, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model.zero_grad()
    with torch.profiler.profile() as record:
        output = model(x)
        output.square().sum().backward()
    used = any(row.key == "fusedops::mlp_tiled_backward" for row in record.key_averages())
    assert used == tiles
    grads = [weight.grad.clone() for weight in model.parameters() if weight.requires_grad]
    return [output.detach(), x.grad, *grads]


@pytest.mark.parametrize("name", MODELS)
def test_patch_and_policies_give_tiles_and_take_them_off(name: str) -> None:
    model, stock = MODELS[name](), name in ("llama", "sequential")
    layer = "" if name == "sequential" else "0"
    want = step(model, tiles=False)
    if stock:
        report = str(fusedops.patch(model, tile_tokens=TILE))
        assert "mlp_tiled" in report and f"in tiles of {TILE} tokens" in report
        assert_all_close(step(model, tiles=True), want, want, depth=F)
        fusedops.patch(model)
        step(model, tiles=False)
    tile = memory.tile(layer, tile_tokens=TILE)
    for rules in ([tile], [tile, memory.recompute(layer)]):
        memory.apply(model, memory.Policy(*rules))
        assert_all_close(step(model, tiles=True), want, want, depth=F)
    memory.remove(model)
    step(model, tiles=False)
    if stock:
        fusedops.patch(model, tile_tokens=TILE)
        fusedops.unpatch(model)
        assert not any("tile_tokens" in vars(module) for module in model.modules())


class Adapter(nn.Module):
    """A linear layer with a small one beside it, as libraries of adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.added = nn.Linear(base.in_features, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.added(x)


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_adapters_are_called_and_the_report_says_so(projection: str) -> None:
    model = llama()
    fusedops.patch(model, tile_tokens=TILE)
    setattr(model[0], projection, Adapter(getattr(model[0], projection)))
    got = step(model, tiles=False)
    assert f"{projection} is a Adapter" in str(fusedops.describe(model))
    fusedops.unpatch(model)
    want = step(model, tiles=False)
    assert_all_close(got, want, want, depth=F)
    with pytest.raises(UnsupportedError, match="no feed-forward layer is one op"):
        fusedops.patch(model, tile_tokens=TILE)


def test_what_has_no_tiles_is_refused() -> None:
    for make in (fusedops.nn.MLP, fusedops.nn.GatedMLP):
        with pytest.raises(ValueError, match="tile_tokens must be at least 1, got 0"):
            make(H, F, tile_tokens=0)
    with pytest.raises(ValueError, match="tile_tokens must be None where the gate has a bias"):
        fusedops.nn.GatedMLP(H, F, bias=True, tile_tokens=TILE)
    with pytest.raises(ValueError, match="keep_hidden must be False with"):
        fusedops.nn.MLP(H, F, keep_hidden=True, tile_tokens=TILE)
    model = nn.Sequential(nn.LayerNorm(H), fusedops.nn.MLP(H, F))
    with pytest.raises(UnsupportedError, match="no feed-forward layer is one op"):
        fusedops.patch(model, tile_tokens=TILE)
    rules = memory.tile("1", tile_tokens=TILE), memory.tile(nn.LayerNorm, tile_tokens=TILE)
    with pytest.raises(UnsupportedError, match="a LayerNorm: tiles are for"):
        memory.apply(model, memory.Policy(*rules))
    assert type(model[0]) is nn.LayerNorm
    assert model[1].tile_tokens is None and "forward" not in vars(model[1])
