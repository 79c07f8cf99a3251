"""Classes and forwards that others put on top of patched modules, and distributed training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patch_testing import assert_close, assert_same_grads, counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

from causal_families import DENSE, GPT2, IDS, SPARSE, loss
from encoder_families import FAMILIES as ENCODERS


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class _Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return twice the weight."""
        return 2 * weight


NORMS: dict[str, Callable[[Any], nn.Module]] = {
    "last norm": lambda model: model.model.norm,
    "norm of a layer": lambda model: model.model.layers[0].input_layernorm,
    "norm after a sum": lambda model: model.model.layers[1].post_attention_layernorm,
}


@pytest.mark.parametrize("find", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("name", ["Llama", "Gemma", "Mixtral", "GptOss"])
def test_a_parametrized_norm(name: str, find: Callable[[Any], nn.Module]) -> None:
    patched, stock = (DENSE | SPARSE)[name].pair()
    for model in (patched, stock):
        parametrize.register_parametrization(find(model), "weight", _Doubled())
    assert_close(loss(patched), loss(stock))
    assert "another class lies on top" in describe(patched)[name_of(patched, find)].reason


def name_of(model: nn.Module, find: Callable[[Any], nn.Module]) -> str:
    return next(name for name, module in model.named_modules() if module is find(model))


def gpt2_with(modules: Callable[[Any], list[nn.Module]], num_products: int) -> Any:
    """Return a case of ``test_gradients_under_fully_shard`` with GPT-2."""
    ops = {"mlp_backward": num_products, "cross_entropy_backward": 1}
    return lambda: GPT2.pair(), modules, ops


def family_with(name: str, find: Callable[[Any], nn.Module]) -> Any:
    """Return a case of ``test_gradients_under_fully_shard`` with one norm on its own."""
    return (DENSE | SPARSE)[name].pair, lambda model: [find(model)], {"attention": 2}


SHARDED: dict[str, Any] = {
    "blocks": gpt2_with(lambda model: list(model.transformer.h), 2),
    "layers of blocks": gpt2_with(lambda model: [h.mlp.c_fc for h in model.transformer.h], 0),
    **{
        f"{name}, {place}": family_with(name, find)
        for name in ("Llama", "Mixtral")
        for place, find in NORMS.items()
    },
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.usefixtures("own_products")
def test_gradients_under_fully_shard(mesh: Any, name: str) -> None:
    make, modules, ops = SHARDED[name]
    patched, stock = make()
    loss(stock).backward()
    for module in [*modules(patched), patched]:
        fully_shard(module, mesh=mesh)
    with counted() as calls:
        loss(patched).backward()
    assert {op: calls[op] for op in ops} == ops
    assert "blocks" in name or calls["rms_norm"] >= 4
    for key, parameter in stock.named_parameters():
        actual = patched.get_parameter(key).grad
        assert_close(copy.copy(actual).full_tensor(), parameter.grad)


@pytest.mark.usefixtures("mesh", "own_products")
def test_gradients_under_distributed_data_parallel() -> None:
    patched, stock = GPT2.pair()
    loss(stock).backward()
    wrapped = DistributedDataParallel(patched)
    with counted() as calls:
        loss(wrapped).backward()
    assert calls["mlp_backward"] == 2 and calls["cross_entropy_backward"] == 1
    assert_same_grads(patched, stock)


def test_unpatch_under_fully_shard_is_refused(mesh: Any) -> None:
    model, _ = GPT2.pair()
    fully_shard(model.transformer.h[0].mlp, mesh=mesh)
    with pytest.raises(fusedops.UnsupportedError, match=r"h\.0\.mlp is a FSDPGPT2MLP"):
        fusedops.unpatch(model)


@pytest.mark.parametrize("name", ["MixtralExperts", "MixtralTopKRouter"])
def test_parametrized_experts_and_routers_are_called(name: str) -> None:
    patched, stock = SPARSE["Mixtral"].pair()
    for model in (patched, stock):
        for module in [child for child in model.modules() if type(child).__name__ == name]:
            weight = "weight" if "Router" in name else "down_proj"
            parametrize.register_parametrization(module, weight, _Doubled())
    with counted() as calls:
        found = loss(patched)
    assert calls["moe_mlp"] == 2
    assert_close(found, loss(stock))


def test_patching_after_fully_shard_is_reported_and_strictly_refused(mesh: Any) -> None:
    model = GPT2.model()
    for block in model.transformer.h:
        fully_shard(block.mlp, mesh=mesh)
    report = fusedops.patch(model)
    entry = report["transformer.h.0.mlp"]
    assert not entry.replaced and entry.failed
    assert entry.reason == "another class lies on top of GPT2MLP: patch before it comes"
    with pytest.raises(fusedops.UnsupportedError, match=r"h\.1\.mlp: another class lies"):
        fusedops.patch(model, strict=True)


def test_a_patch_that_fails_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    fusedops.patch(model, level="O1")
    before = [type(module) for module in model.modules()]

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fusedops.integrations.hf.patch.resolution", fail)
    with pytest.raises(KeyboardInterrupt):
        fusedops.patch(model)
    assert [type(module) for module in model.modules()] == before


def test_unpatch_under_mixed_precision_of_accelerate() -> None:
    """``prepare`` keeps the forward that it found on the instance, inside of its own."""
    accelerate = pytest.importorskip("accelerate")
    reset = accelerate.state.AcceleratorState._reset_state  # of the process: a Trainer has made one
    reset(reset_partial_state=True)
    family = ENCODERS["BertForMaskedLM"]
    patched, stock = family.pair()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    patched, stock = accelerator.prepare(patched, stock)
    for _ in range(2):
        with counted() as calls:
            family.loss(patched)
        assert calls["cross_entropy"] == 1 and calls["attention"] == 2
        fusedops.unpatch(patched)
        with counted() as calls:
            found = family.loss(patched)
        assert not calls and torch.equal(found, family.loss(stock))
        assert fusedops.patch(patched)[""].replaced
    reset(reset_partial_state=True)


@pytest.mark.usefixtures("own_products")
def test_a_forward_of_somebody_else_on_the_instance_is_reported() -> None:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: torch.zeros_like(x)
    with counted() as calls:
        model(IDS)
    assert calls["linear_glu"] == 1
    reason = "steps aside now: its forward is overridden on the instance"
    assert describe(model)["model.layers.0.mlp"].reason == reason
    fusedops.unpatch(model)
    assert not fusedops.patch(model)["model.layers.0.mlp"].replaced


def test_context_parallelism_sees_the_attention(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchanges, which have no kernel on a CPU, are left out: that they are called counts."""
    seen = []

    def enter(module: None, args: tuple, kwargs: dict, mesh: object) -> tuple[tuple, dict]:
        seen.append(mesh)
        return args, kwargs

    monkeypatch.setattr(_ContextParallel, "sdpa_input_fn", staticmethod(enter))
    monkeypatch.setattr(
        _ContextParallel,
        "sdpa_output_fn",
        staticmethod(lambda *args: args[2]),
    )
    model = DENSE["Llama"].model(attn_implementation="sdpa")
    fusedops.patch(model)
    expected = model(IDS).logits
    with counted() as calls, context_parallel(mesh, buffers=[IDS.clone()], buffer_seq_dims=[1]):
        logits = model(IDS).logits
        entry = describe(model)["model.layers.0.self_attn"]
    assert seen == [mesh, mesh] and "attention" not in calls
    assert "F.scaled_dot_product_attention was replaced by torch.distributed" in entry.reason
    assert_close(logits, expected)
    with counted() as calls:
        model(IDS)
    assert calls["attention"] == 2
