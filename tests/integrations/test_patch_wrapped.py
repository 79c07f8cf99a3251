"""Classes and forwards that others put on top of patched modules, and distributed training."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import BERT, CORE, DENSE, GPT2, IDS, loss
from patch_testing import assert_close, assert_same_grads, counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

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
        assert describe(patched)[path].reason.startswith("wrapped after patch")
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
    root = nn.LayerNorm(8)
    fusedops.patch(root)
    fully_shard(root, mesh=mesh)
    with pytest.raises(fusedops.UnsupportedError, match="the model is a FSDPLayerNorm"):
        fusedops.unpatch(root)


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
    reason = "falls back now: its forward is overridden on the instance"
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


# Weights of which ZeRO-3 keeps a part, between two forwards none.

HOME = "deepspeed.runtime.zero.parameter_offload"


class _Parameters(OrderedDict):
    """A module's parameters, which gathers one that is read while a module runs."""

    def __init__(self, parameters: dict[str, Any], engine: Engine) -> None:
        super().__init__(parameters)
        self.engine = engine

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if self.engine.running and parameter is not None and not parameter.numel():
            self.engine.borrowed[self.engine.running[-1]].add(parameter)
            self.engine.gather(parameter)
        return parameter


_Parameters.__module__ = HOME


class Engine:
    """Keeps a model's weights away while they are not needed, as DeepSpeed's engine does.

    Parameters are empty between two forwards, hooks on every module gather its own, and reading
    the parameter of another module gathers it and leaves it to the hooks of the module that runs.

    Attributes:
        running: the modules that run, innermost last.
        borrowed: the parameters of others that a module has read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running: list[nn.Module] = []
        self.borrowed: dict[nn.Module, set[Any]] = defaultdict(set)
        self.weights = {parameter: parameter.data for parameter in model.parameters()}
        for weight in self.weights:
            weight.ds_shape = weight.shape
        self.release(*self.weights)

    def gather(self, *parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = self.weights[parameter]

    def release(self, *parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)

    def _needed(self, module: nn.Module) -> list[Any]:
        own = dict.values(module._parameters)
        return [*(each for each in own if each is not None), *self.borrowed[module]]

    def hook(self) -> None:
        """Put the hooks on every module."""

        def enter(module: nn.Module, args: Any) -> None:
            self.running.append(module)
            self.gather(*self._needed(module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            self.release(*self._needed(module))
            for each in output if isinstance(output, tuple) else (output,):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda grad: self.gather(*self._needed(module)))

        for hook in (enter, leave):
            hook.__module__ = HOME
        for module in self.model.modules():
            module._parameters = _Parameters(module._parameters, self)
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


@pytest.mark.parametrize("name", CORE)
def test_patch_and_describe_know_the_shapes_of_partitioned_weights(name: str) -> None:
    whole = CORE[name].model()
    model = copy.deepcopy(whole)
    expected = str(fusedops.patch(whole))
    Engine(model)
    assert str(fusedops.patch(model)) == expected
    assert str(describe(model)).splitlines()[1:] == str(describe(whole)).splitlines()[1:]
    fusedops.unpatch(model)
    assert describe(model).num_replaced == 0


@pytest.mark.parametrize("patched_first", [True, False], ids=["patched first", "partitioned first"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "OPT", "Mixtral", "GPT2", "BertForMaskedLM"])
@own_products
def test_training_where_hooks_gather(name: str, patched_first: bool) -> None:
    family = CORE[name]
    stock = family.model()
    model = copy.deepcopy(stock)
    family.loss(stock).backward()
    if patched_first:
        fusedops.patch(model)
    engine = Engine(model)
    engine.hook()
    if not patched_first:
        fusedops.patch(model)
    for _ in range(2):  # the second time the hooks gather what others read
        model.zero_grad()
        with counted() as calls:
            family.loss(model).backward()
        engine.release(*engine.weights)
    ops = {"layer_norm": 5} if name == "GPT2" else family.ops
    assert {op: calls[op] for op in ops} == ops
    assert_same_grads(model, stock)


def test_another_hook_beside_those_that_gather_is_called() -> None:
    model = DENSE["Llama"].model()
    fusedops.patch(model)
    Engine(model).hook()
    seen: list[nn.Module] = []
    mlp = model.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(module))
    with counted() as calls:
        loss(model)
    assert seen == [mlp.act_fn] and calls["linear_glu"] == 1
    entry = describe(model)["model.layers.0.mlp"]
    assert entry.reason == "falls back now: act_fn has hooks"


# transformers' own expert and tensor parallelism.

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
    tmp_path: Path, on_processes: Callable[..., Any]
) -> None:
    CORE["Qwen3Moe"].model().save_pretrained(tmp_path)
    on_processes(_experts, 2, str(tmp_path))


def _planned(rank: int, folder: str) -> None:
    load = LlamaForCausalLM.from_pretrained
    model, whole = load(folder, tp_plan="auto"), load(folder)
    divided, weight = (each.model.layers[0].mlp.up_proj.weight for each in (model, whole))
    assert divided.to_local().numel() == weight.numel() // PROCESSES
    fusedops.patch(model)
    with counted() as calls:
        found = _gradients(model)
    assert all(calls[op] for op in ("rms_norm", "attention", "swiglu"))
    for name, expected in _gradients(whole).items():
        assert_close(found[name], expected)


def test_a_patched_model_under_transformers_plan_gives_the_gradients_of_one_process(
    tmp_path: Path, on_processes: Callable[..., Any]
) -> None:
    DENSE["Llama"].model(vocab_size=98).save_pretrained(tmp_path)
    on_processes(_planned, 2, str(tmp_path))
