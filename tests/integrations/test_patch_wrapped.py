"""Classes and forwards that others put on top of patched modules, and distributed training."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import BERT, CORE, DENSE, GPT2, IDS, loss
from patch_testing import assert_close, counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from transformers import Qwen3MoeForCausalLM

import fusedops
from fusedops.integrations import describe

own_products = pytest.mark.usefixtures("own_products")


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


# The last norm, one of a layer, and one after a sum.
NORMS = ("model.norm", "model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm")
PARAMETRIZED = [
    *((name, path, "weight") for name in ("Llama", "Gemma", "Mixtral", "GptOss") for path in NORMS),
    ("Mixtral", "model.layers.0.mlp.experts", "down_proj"),
    ("Mixtral", "model.layers.1.mlp.gate", "weight"),
    ("GPT2", "transformer.h.1.attn.c_attn", "weight"),
    ("GPT2", "transformer.h.0.mlp.c_proj", "weight"),
]


@pytest.mark.parametrize(("name", "path", "weight"), PARAMETRIZED)
def test_a_parametrized_weight(name: str, path: str, weight: str) -> None:
    patched, stock = CORE[name].pair()
    for model in (patched, stock):
        parametrize.register_parametrization(model.get_submodule(path), weight, _Doubled())
    with counted() as calls:
        value = loss(patched)
    assert calls["moe_mlp"] == CORE[name].ops.get("moe_mlp", 0)
    assert_close(value, loss(stock))
    if path in NORMS:
        assert "another class lies on top" in describe(patched)[path].reason
    if path.endswith("c_proj"):
        with pytest.raises(fusedops.UnsupportedError, match="h.0.mlp.c_proj is a Parametrized"):
            fusedops.unpatch(patched)


OF_LAYERS = {"attention": 2}
OF_BLOCKS = {"mlp_backward": 2, "cross_entropy_backward": 1}
# What is sharded by itself, and ops that run then.
SHARDED: dict[str, tuple[str, Callable[[Any], list[nn.Module]], dict[str, int]]] = {
    "blocks": ("GPT2", lambda model: list(model.transformer.h), OF_BLOCKS),
    "layers of blocks": (
        "GPT2",
        lambda model: [block.mlp.c_fc for block in model.transformer.h],
        OF_BLOCKS | {"mlp_backward": 0},
    ),
    **{
        f"{name}, {path}": (name, lambda model, path=path: [model.get_submodule(path)], OF_LAYERS)
        for name in ("Llama", "Mixtral")
        for path in NORMS
    },
}


@pytest.mark.parametrize("case", SHARDED)
@own_products
def test_gradients_under_fully_shard(mesh: Any, case: str) -> None:
    name, modules, ops = SHARDED[case]
    patched, stock = CORE[name].pair()
    loss(stock).backward()
    for module in [*modules(patched), patched]:
        fully_shard(module, mesh=mesh)
    with counted() as calls:
        loss(patched).backward()
    assert {op: calls[op] for op in ops} == ops
    assert name == "GPT2" or calls["rms_norm"] >= 4
    for key, parameter in stock.named_parameters():
        actual = patched.get_parameter(key).grad
        assert_close(copy.copy(actual).full_tensor(), parameter.grad)


def test_unpatch_under_fully_shard_is_refused(mesh: Any) -> None:
    model, _ = GPT2.pair()
    fully_shard(model.transformer.h[0].mlp, mesh=mesh)
    with pytest.raises(fusedops.UnsupportedError, match=r"h\.0\.mlp is a FSDPGPT2MLP"):
        fusedops.unpatch(model)


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
    patched, stock = BERT.pair()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    patched, stock = accelerator.prepare(patched, stock)
    for _ in range(2):
        with counted() as calls:
            BERT.loss(patched)
        assert calls["cross_entropy"] == 1 and calls["attention"] == 2
        fusedops.unpatch(patched)
        with counted() as calls:
            value = BERT.loss(patched)
        assert not calls and torch.equal(value, BERT.loss(stock))
        assert fusedops.patch(patched)[""].replaced
    reset(reset_partial_state=True)


@own_products
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


# Weights of which DeepSpeed's ZeRO-3 keeps a part; ``tests/clients/test_trainer.py`` trains so.


@pytest.mark.parametrize("name", CORE)
def test_patch_and_describe_know_the_shapes_of_partitioned_weights(name: str) -> None:
    whole = CORE[name].model()
    model = copy.deepcopy(whole)
    expected = str(fusedops.patch(whole))
    for weight in model.parameters():  # as they are between two forwards
        weight.ds_shape, weight.data = weight.shape, weight.data.new_empty(0)
    assert str(fusedops.patch(model)) == expected
    assert str(describe(model)).splitlines()[1:] == str(describe(whole)).splitlines()[1:]
    fusedops.unpatch(model)
    assert describe(model).num_replaced == 0


class _Gathered(OrderedDict):
    """Parameters of a module, each of which is gathered where it is read."""

    __module__ = "deepspeed.runtime.zero.parameter_offload"


def _gather(module: nn.Module, args: Any) -> None:
    """Stand for a hook that gathers the parameters of a module."""


_gather.__module__ = _Gathered.__module__


def test_hooks_that_gather_may_be_bypassed_and_no_others() -> None:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    for module in model.modules():
        module._parameters = _Gathered(module._parameters)
        module.register_forward_pre_hook(_gather)
    with counted() as calls:
        loss(model)
    assert calls["linear_glu"] == 2
    seen: list[nn.Module] = []
    mlp = model.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(module))
    with counted() as calls:
        loss(model)
    assert seen == [mlp.act_fn] and calls["linear_glu"] == 1
    entry = describe(model)["model.layers.0.mlp"]
    assert entry.reason == "steps aside now: act_fn has hooks"


# transformers' own expert parallelism. Tensor parallelism: ``tests/clients/test_torch.py``.

PROCESSES = 2


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    loss(model).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def _experts(rank: int, folder: str) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    fusedops.register_experts()
    by_size = hasattr(DistributedConfig, "ep_size")  # transformers 5.23
    how = {"ep_size": PROCESSES} if by_size else {"enable_expert_parallel": True}
    shards = DistributedConfig(tp_size=PROCESSES, **how)
    load = Qwen3MoeForCausalLM.from_pretrained
    options = {"dtype": torch.float32}
    model = load(folder, distributed_config=shards, experts_implementation="fusedops", **options)
    assert model.model.layers[0].mlp.experts.num_experts == 6 // PROCESSES
    whole = load(folder, experts_implementation="eager", **options)
    with counted() as calls:
        found = _gradients(model)
    assert calls["moe_mlp"] == calls["moe_mlp_backward"] == 2
    for name, expected in _gradients(whole).items():
        assert_close(found[name], expected)


def test_gradients_of_divided_experts_are_those_of_one_process(
    tmp_path: Path, on_new_world: Callable[..., Any]
) -> None:
    CORE["Qwen3Moe"].model().save_pretrained(tmp_path)
    on_new_world(_experts, str(tmp_path))
