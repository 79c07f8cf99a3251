"""Experts in host memory: the bits of a run that keeps them, and only those that are used move."""

from __future__ import annotations

import copy
import functools
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from one_process import full_tensor
from stepped_engine import WatchedEngine
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import memory
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.runtime.copy_engine import HostCopyEngine
from fusedops.testing import threads

STEPS = 4
# One expert a token, by its id: with few words some experts rest, others in each step.
CONFIG = replace(preset("tiny-mixtral"), num_experts=8, top_k=1, router="hash", balance_loss=0.0)


def _train(rank: int, values: dict[str, Any]) -> Any:
    """Return losses, weights and what layers moved, of a few steps on other words each."""
    model = Transformer(CONFIG, device="meta")
    run = parallelize(model, ParallelConfig(**values), seed=3)
    optimizer = run.optimizer(lr=0.05, weight_decay=0.1)
    losses, chosen = [], []
    stores = [layer.feed_forward.experts.stored for layer in model.layers.values()]
    for step in range(STEPS):
        words = 5 * step + torch.arange(4) % 3
        tokens = run.rows(words[:, None] + torch.arange(9) % 2)
        shard = run.shard_batch(tokens[:, :-1], tokens[:, 1:])
        count = run.count(shard.labels)
        losses.append(float(run.mean_loss(run.step([shard], count), count)))
        chosen.append([each.traffic.chosen for each in stores if each is not None])
        run.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: full_tensor(parameter) for name, parameter in model.named_parameters()}
    return losses, weights, chosen, [store and copy.copy(store.traffic) for store in stores]


@functools.cache
def _kept(ranks: int, ep: int) -> Any:
    return threads.run(_train, ranks, {"dp": ranks, "ep": ep})[0]


CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "recomputed": {"recompute": "full"},
    "beside all that can be offloaded": {"offload": ("experts", "activations", "optimizer")},
    "shared by two": {"dp": 2, "ep": 2},
    "shared and recomputed": {"dp": 2, "ep": 2, "recompute": "full"},
    "copies on two": {"dp": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_experts_that_stay(case: str) -> None:
    values = {"offload": ("experts",), **CASES[case]}
    config = ParallelConfig(**values)
    ranks = config.dp
    wanted, weights, *_ = _kept(ranks, config.ep)
    for losses, found, chosen, traffic in threads.run(_train, ranks, values):
        assert losses == wanted
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        here = 8 // config.ep
        experts = (each[0] for name, each in weights.items() if ".0.feed" in name and "exp" in name)
        one = sum(expert.nbytes for expert in experts)
        for layer, each in enumerate(traffic):
            used = [step[layer] for step in chosen]
            assert all(0 < len(some) < here for some in used) and len(set(used)) > 1
            times = 3 if config.recompute == "full" else 2
            assert each.fetched_bytes == times * one * sum(map(len, used))
            assert each.returned_bytes == one * sum(map(len, used))


def test_resting_experts_have_no_gradient_in_memory() -> None:
    layer = fusedops.nn.MoE(256, 1024, num_experts=32, top_k=1, router=False)
    memory.store_experts(layer, "cpu")
    plan = fusedops.hash_route(torch.zeros(3, dtype=torch.int64), 32)
    whole = sum(each.nbytes for each in layer.parameters())
    before = _resident()
    layer(torch.ones(3, 256), plan=plan).sum().backward()
    assert _resident() - before < whole / 2
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _stored(kept: Any, engine: HostCopyEngine, **settings: Any) -> Any:
    """Return a model like another one, whose experts are stored and copied by an engine."""
    stored = copy.deepcopy(kept)
    options = memory.OffloadSettings(engine=lambda device: engine, **settings)
    memory.store_experts(stored, "cpu", settings=options)
    return stored


def _pair(
    engine: Any = None, *, router: bool = True, transposed: bool = False, **settings: Any
) -> Any:
    """Return a layer, one like it whose experts are stored, and what copies them."""
    torch.manual_seed(0)
    kept = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2, bias=True, router=router)
    if transposed:
        kept.experts.down_proj = torch.nn.Parameter(kept.experts.down_proj.mT.contiguous().mT)
    engine = engine or WatchedEngine()
    return kept, _stored(kept, engine, **settings), engine


def _assert_same_gradients(one: Any, other: Any) -> None:
    assert_same_bits([each.grad for each in one.parameters()], [x.grad for x in other.parameters()])


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_experts_are_on_the_device_while_their_node_runs(trained: bool) -> None:
    """Also while the graph, or the loss that holds it, lives on."""
    torch.manual_seed(0)
    kept = torch.nn.Sequential(*(fusedops.nn.MoE(16, 32, 6, 2) for _ in range(3)))
    for layer in kept:
        layer.experts.requires_grad_(trained)
    engine = WatchedEngine()
    seen: list[int] = []
    stored = _stored(kept, engine)
    for layer in stored:
        layer.register_full_backward_hook(lambda *_: seen.append(engine.nbytes))
    x = torch.randn(5, 16, requires_grad=True)
    losses = [layers(x).square().sum() for layers in (kept, stored)]
    assert engine.nbytes == 0
    for loss in losses:
        for again in (True, False):
            loss.backward(retain_graph=again)
    assert seen == [0] * 6 and engine.nbytes == 0
    _assert_same_gradients(kept, stored)


def _checkpointed(layer: Any, x: torch.Tensor, *, use_reentrant: bool) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        return layer(x.tanh()).square().sin()  # keeps something behind the layer as well

    return checkpoint(block, x, use_reentrant=use_reentrant)


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "alone": lambda layer, x: layer(x).square(),
    "compiled": lambda layer, x: torch.compile(layer, backend="eager")(x).square(),
    "checkpoint of torch": partial(_checkpointed, use_reentrant=False),
    "reentrant": partial(_checkpointed, use_reentrant=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_experts_that_stay(call: Callable[..., torch.Tensor]) -> None:
    """Also where weights lie transposed, copies come late, and of a copy of the layer."""
    late = HostCopyEngine(workers=3, delay=lambda number: 0.02 * (number % 2))
    kept, stored, _ = _pair(late, transposed=True, check=True)
    x = torch.randn(4, 16, requires_grad=True)
    results = []
    for layer in (kept, stored, copy.deepcopy(stored)):
        x.grad = None
        output = call(layer, x)
        output.sum().backward()
        results.append([output.detach(), x.grad, *(each.grad for each in layer.parameters())])
    assert_same_bits(results[1:], [results[0]] * 2)


def test_in_mixed_precision_experts_are_on_the_device_in_the_dtype_of_the_products() -> None:
    kept, stored, engine = _pair(router=False)
    plan = fusedops.RoutingPlan.from_choices(torch.tensor([[1, 4], [4, 3]]), torch.ones(2, 2), 6)
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    for layer in (kept, stored):
        saved.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
            output = layer(torch.ones(2, 16), plan=plan)
        output.float().square().sum().backward()
    _assert_same_gradients(kept, stored)
    held = [each for each in saved if each.dtype == torch.bfloat16 and each.dim() == 3]
    assert len(held) == 2 and not any(each.untyped_storage().nbytes() for each in held)
    traffic = stored.experts.stored.traffic
    assert 4 * traffic.returned_bytes == traffic.fetched_bytes  # a half, of what came twice


def test_weights_that_change_before_the_backward_are_told() -> None:
    _, stored, _ = _pair()
    loss = stored(torch.randn(4, 16)).sum()
    with torch.no_grad():
        stored.experts.down_proj.mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_that_of_experts_that_stay_or_is_refused() -> None:
    kept, stored, _ = _pair(router=False)
    plan = fusedops.RoutingPlan.from_choices(torch.tensor([[1, 4], [4, 3]]), torch.ones(2, 2), 6)
    x = torch.randn(2, 16)
    found = []
    for layer in (kept, stored):
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(given, plan=plan).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), given)[0])
    assert torch.equal(*found)
    weight = stored.experts.down_proj
    (grad,) = torch.autograd.grad(stored(x, plan=plan).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_weights_lie_in_pinned_memory_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        pinned.append(found.data_ptr())
        return found

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    layer = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2)
    before = {name: (each, each.detach().clone()) for name, each in layer.named_parameters()}
    settings = memory.OffloadSettings(engine=lambda device: HostCopyEngine())
    memory.store_experts(layer, "cuda", settings=settings)
    assert [each.data_ptr() for each in layer.experts.parameters()] == pinned
    for name, parameter in layer.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_a_plan_over_other_experts_is_told() -> None:
    _, stored, _ = _pair()
    plan = fusedops.hash_route(torch.arange(3), 8)
    with pytest.raises(ValueError, match="plan must be one over 6 experts, got 8 experts"):
        stored(torch.randn(3, 16), plan=plan)


def test_no_token_and_no_gradient() -> None:
    layer = fusedops.nn.MoE(16, 32, num_experts=6, top_k=2)
    (traffic,) = memory.store_experts(layer, "cpu").values()
    assert layer(torch.ones(0, 16)).shape == (0, 16)
    with torch.no_grad():
        layer(torch.ones(1, 16))
    assert len(traffic.chosen) == 2 and traffic.returned_bytes == 0


@pytest.mark.parametrize(
    ("model", "device", "error", "says"),
    [
        (torch.nn.Linear(2, 2), "cpu", ValueError, "one with fusedops.nn.MoE layers, got none"),
        (None, "nowhere", ValueError, "device must be the name of a device, got 'nowhere'"),
        (None, "meta", ValueError, "device must be a CPU or a CUDA device, got 'meta'"),
        (None, None, TypeError, "device must be a torch.device or the name of one"),
    ],
)
def test_what_cannot_be_stored_is_told(
    model: Any, device: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        memory.store_experts(model or fusedops.nn.MoE(16, 32, 6, 2), device)


def test_experts_are_stored_once_and_do_not_pickle() -> None:
    model = torch.nn.ModuleList(fusedops.nn.MoE(16, 32, 6, 2) for _ in range(2))
    memory.store_experts(model[1], "cpu")
    with pytest.raises(ValueError, match="whose experts are not stored already, got layer '1'"):
        memory.store_experts(model, "cpu")
    assert model[0].experts.stored is None  # nothing has changed
    with pytest.raises(fusedops.UnsupportedError, match="does not pickle: save its state_dict"):
        pickle.dumps(model[1])


def _stages(rank: int) -> int:
    values: dict[str, Any] = {"pp": 2, "microbatches": 2, "offload": "experts"}
    model = Transformer(replace(CONFIG, num_layers=4, moe_layers=1), device="meta")
    run = parallelize(model, ParallelConfig(**values), seed=0)
    shard = run.shard_batch(torch.arange(8)[None], torch.arange(8)[None])
    run.step([shard, shard], run.count(torch.cat([shard.labels, shard.labels])))
    assert all(parameter.grad is not None for parameter in model.parameters())
    parts = [layer.feed_forward for layer in model.layers.values()]
    return sum(isinstance(part, fusedops.nn.MoE) for part in parts)


def test_a_stage_of_a_pipeline_may_have_no_experts() -> None:
    assert threads.run(_stages, 2) == [0, 1]


def _refused(rank: int) -> None:
    dense = Transformer(preset("tiny-llama"), device="meta")
    with pytest.raises(ValueError, match="offload must be without 'experts' for a model that has"):
        parallelize(dense, ParallelConfig(dp=2, offload="experts"))
    model = Transformer(CONFIG, device="meta")
    with pytest.raises(fusedops.UnsupportedError, match="where 2 processes have the same experts"):
        parallelize(model, ParallelConfig(dp=2, zero=1, offload="experts"))


def test_experts_that_zero_divides_are_refused() -> None:
    threads.run(_refused, 2)
