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
Leaves = dict[str, torch.Tensor | None]


def leaves(
    dtype: torch.dtype, *, gated: bool, rows: tuple[int, ...] = (3, 10), transposed: bool = False
) -> Leaves:
    """Return the tensors of a layer by their names."""
    generator = torch.Generator().manual_seed(3)

    def new(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).bfloat16().to(dtype)
        swaps = transposed and len(shape) == 2
        return (values.t().contiguous().t() if swaps else values).requires_grad_()

    gate = {"b1": None if gated else new(F), "up_weight": new(F, H) if gated else None}
    return {"input": new(*rows, H), "w1": new(F, H), **gate, "w2": new(H, F), "b2": new(H)}


def tiled(given: Leaves, activation: str = "silu", tile_tokens: int = TILE) -> torch.Tensor:
    return mlp_tiled(**given, activation=activation, tile_tokens=tile_tokens)


def eager(given: Leaves, activation: str = "silu") -> torch.Tensor:
    linear = nn.functional.linear
    hidden = ACTIVATIONS[activation](linear(given["input"], given["w1"], given["b1"]))
    if given["up_weight"] is not None:
        hidden = hidden * linear(given["input"], given["up_weight"])
    return linear(hidden, given["w2"], given["b2"])


def results(given: Leaves, output: torch.Tensor) -> dict[str, torch.Tensor]:
    asked = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    grads = torch.autograd.grad(output, list(asked.values()), weights.to(output.dtype))
    return {"output": output.detach(), **dict(zip(asked, grads, strict=True))}


def assert_right(got: dict[str, torch.Tensor], make: Callable[[torch.dtype], Leaves]) -> None:
    dtype = got["output"].dtype
    exact, stock = make(torch.float64), make(dtype)
    want, base = results(exact, eager(exact)), results(stock, eager(stock))
    assert_all_close(got, want, base, depth=F)


@BACKENDS
@GATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["dense", "transposed"])
def test_values_and_gradients(
    backend: str | None, dtype: torch.dtype, gated: bool, transposed: bool
) -> None:
    def make(dtype: torch.dtype) -> Leaves:
        return leaves(dtype, gated=gated, transposed=transposed)

    given = make(dtype)
    with fusedops.use_backend(backend):
        got = results(given, tiled(given))
    assert_right(got, make)
    for name in ("w1", "up_weight", "w2"):
        assert given[name] is None or got[name].stride() == given[name].stride()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_gate_differentiates_as_in_float64(activation: str) -> None:
    given = leaves(torch.float64, gated=True)
    want = results(given, eager(given, activation))
    assert_all_close(results(given, tiled(given, activation)), want, want, depth=F)


def test_second_derivatives() -> None:
    given = leaves(torch.float64, gated=True, rows=(3,))
    tensors = [given[name] for name in ("input", "w1", "up_weight", "w2", "b2")]

    def layer(x: Any, w1: Any, up: Any, w2: Any, b2: Any) -> torch.Tensor:
        options = {"activation": "silu", "tile_tokens": 2, "up_weight": up[:3]}
        return mlp_tiled(x, w1[:3], None, w2[:2, :3], b2[:2], **options)

    assert torch.autograd.gradcheck(layer, tensors)
    assert torch.autograd.gradgradcheck(layer, tensors)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_rounded_once(backend: str | None, dtype: torch.dtype) -> None:
    rows = 4096
    x, weight = torch.ones(rows, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    with fusedops.use_backend(backend):
        y = fusedops.mlp(x, weight, bias, weight, bias, activation="relu", tile_tokens=64)
        grads = torch.autograd.grad(y, [weight, bias], torch.full_like(y, 1 / 64))
        one = fusedops.mlp(x[:64], weight, bias, weight, bias, activation="relu", tile_tokens=1)
        first = torch.full_like(one, 1.0)
        first[0] = 1024.0  # to which a sum in half precision would add nothing
        odd = torch.autograd.grad(one, weight, first)
    assert [grad.item() for grad in grads] == [2 * rows / 64] * 2
    want = torch.tensor(1024.0 + 63).to(dtype) * 2
    assert odd[0].item() == want.item()


@GATED
def test_rows_that_are_no_multiple_of_a_tile_and_none(gated: bool) -> None:
    for rows in ((0,), (1,), (2 * TILE,), (2 * TILE + 1,)):
        given = leaves(torch.float32, gated=gated, rows=rows)
        got = results(given, tiled(given))
        assert_right(got, lambda dtype, rows=rows: leaves(dtype, gated=gated, rows=rows))
        assert rows != (0,) or not any(grad.any() for grad in got.values())


@GATED
@pytest.mark.parametrize("frozen", [("w1", "w2"), ("input", "w1", "b1", "up_weight"), ("w1",)])
def test_frozen_parameters_get_no_gradient(gated: bool, frozen: tuple[str, ...]) -> None:
    def make(dtype: torch.dtype) -> Leaves:
        given = leaves(dtype, gated=gated)
        for name in frozen:
            if given[name] is not None:
                given[name] = given[name].detach()
        return given

    given = make(torch.float32)
    assert_right(results(given, tiled(given)), make)


def test_gradients_add_to_those_that_exist_and_autocast_lowers() -> None:
    given = leaves(torch.float32, gated=True)
    want = leaves(torch.bfloat16, gated=True)
    tiled(want).sum().backward()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            output = tiled(given)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    for name, leaf in given.items():
        if leaf is not None:
            assert torch.equal(leaf.grad, 2 * want[name].grad.float())


@GATED
def test_checkpointing_and_compilation_give_the_same_bits(gated: bool) -> None:
    given = leaves(torch.float32, gated=gated)
    want = results(given, tiled(given))
    again = checkpoint(lambda: tiled(given), use_reentrant=False)
    compiled = torch.compile(tiled, backend="aot_eager", fullgraph=True)(given)
    for output in (again, compiled):
        got = results(given, output)
        assert all(torch.equal(got[name], value) for name, value in want.items())


@GATED
def test_products_are_counted(gated: bool) -> None:
    given = leaves(torch.float32, gated=gated)
    with FlopCounterMode(display=False) as forward:
        output = tiled(given)
    with FlopCounterMode(display=False) as backward:
        results(given, output)
    product = 2 * output.numel() * F
    assert forward.get_total_flops() == (3 if gated else 2) * product
    assert backward.get_total_flops() == (8 if gated else 5) * product


@GATED
def test_a_step_needs_a_quarter_of_the_memory(gated: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 64, requires_grad=True)
    make = fusedops.nn.GatedMLP if gated else fusedops.nn.MLP

    def peak(tile_tokens: int | None) -> int:
        layer = make(64, 256, tile_tokens=tile_tokens)
        return peak_bytes(lambda: layer(x).sum().backward(), x.device)

    peak(None), peak(256)  # a first call fills caches
    assert 4 * peak(256) <= peak(None)


def llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=H, intermediate_size=F, num_attention_heads=2)
    return nn.Sequential(LlamaMLP(config))


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, F), nn.GELU(), nn.Linear(F, H))


def step(model: nn.Module) -> list[torch.Tensor]:
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 11, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    parameters = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *parameters]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "sequential": sequential,
    "gated": lambda: nn.Sequential(fusedops.nn.GatedMLP(H, F)),
    "plain": lambda: nn.Sequential(fusedops.nn.MLP(H, F, keep_hidden=True)),
}


def uses_tiles(model: nn.Module) -> bool:
    with torch.profiler.profile() as record:
        step(model)
    return any(event.key == "fusedops::mlp_tiled_backward" for event in record.key_averages())


@pytest.mark.parametrize("name", ["llama", "sequential"])
def test_patch_gives_tiles_until_unpatch(name: str) -> None:
    model = MODELS[name]()
    base, want = step(model), step(MODELS[name]().double())
    report = fusedops.patch(model, tile_tokens=TILE)
    assert "mlp_tiled" in str(report) and f"in tiles of {TILE} tokens" in str(report)
    assert uses_tiles(model)
    assert_all_close(step(model), want, base, depth=F)
    fusedops.patch(model)
    assert not uses_tiles(model)
    fusedops.unpatch(model)
    assert not any("tile_tokens" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_gives_tiles_until_it_is_removed(name: str) -> None:
    model = MODELS[name]()
    layer = "" if name == "sequential" else "0"
    if name in ("llama", "sequential"):
        fusedops.patch(model)
    want = step(model)
    policy = memory.Policy(memory.tile(layer, tile_tokens=TILE))
    for rules in (policy, memory.Policy(*policy.rules, memory.recompute(layer))):
        memory.apply(model, rules)
        assert uses_tiles(model)
        assert_all_close(step(model), want, want, depth=F)
    memory.remove(model)
    assert not uses_tiles(model)
    assert all(torch.equal(*pair) for pair in zip(step(model), want, strict=True))


class Adapter(nn.Module):
    """A linear layer with two small ones beside it, as libraries of adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_adapters_are_called_and_the_report_says_so(projection: str) -> None:
    model = llama()
    fusedops.patch(model, tile_tokens=TILE)
    setattr(model[0], projection, Adapter(getattr(model[0], projection)))
    got = step(model)
    assert f"{projection} is a Adapter" in str(fusedops.describe(model))
    fusedops.unpatch(model)
    want = step(model)
    assert len(got) == len(want)
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
    with pytest.raises(TypeError, match="patch: tile_tokens must be an int"):
        fusedops.patch(llama(), tile_tokens=1.5)
    model = nn.Sequential(nn.LayerNorm(H), fusedops.nn.MLP(H, F))
    with pytest.raises(UnsupportedError, match="no feed-forward layer is one op"):
        fusedops.patch(model, tile_tokens=TILE)
    assert type(model[0]) is nn.LayerNorm
    rules = memory.tile("1", tile_tokens=TILE), memory.tile(nn.LayerNorm, tile_tokens=TILE)
    with pytest.raises(UnsupportedError, match="a LayerNorm: tiles are for"):
        memory.apply(model, memory.Policy(*rules))
    assert model[1].tile_tokens is None and "forward" not in vars(model[1])
