"""Policies between processes: what is reported, and what a second forward communicates."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from one_process import full_tensor
from small_models import Count, encoder, encoder_loss
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fusedops
from fusedops import memory
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.planner import Layout
from fusedops.planner.memory import layer_bytes

pytestmark = pytest.mark.distributed


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


def gathers(world: Any, again: bool | None) -> tuple[int, list[torch.Tensor]]:
    """Return how many gathers of weights a step under FSDP2 makes, and the gradients."""
    model = encoder(layers=3)
    if again is not None:
        rule = memory.recompute("*", parallel_optimizer_comm_recompute=again)
        memory.apply(model, memory.Policy(rule))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(world.rank)
    with Count() as count:
        encoder_loss(model).backward()
    return count.collectives("gather"), _gradients(model)


def test_weights_are_gathered_again_in_the_backward_or_not(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    plain = on_two_ranks(gathers, None)
    for again, count in ((True, 6), (False, 3)):
        assert_same_bits(on_two_ranks(gathers, again), [(count, grads) for _, grads in plain])


def sharded_report(world: Any, layout: str) -> tuple[Any, Any, int, int]:
    """Return what ``report`` and ``fit`` find of a sharded model, its bytes here and the budget."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        if layout == "fsdp2":
            fully_shard(layer)
        else:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    if layout == "fsdp2":
        fully_shard(model)
    rows = 512 if world.rank == 0 or layout != "fsdp2" else 256  # of FSDP2's batches
    batch = torch.randn(rows, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    usual = memory.report(model, batch, optimizer=optimizer)
    budget = torch.tensor(usual.weights + usual.states + int(0.75 * usual.dynamic))
    dist.broadcast(budget, 0)
    chosen = memory.fit(model, batch, int(budget), optimizer=optimizer)
    here = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return usual, (str(chosen.policy), chosen.peak), here, int(budget)


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["fsdp2", "tensor parallel"])
def test_a_rank_learns_its_own_bytes_and_all_choose_one_policy(
    on_two_ranks: Callable[..., list[Any]], layout: str
) -> None:
    policies = set()
    for usual, (policy, peak), here, budget in on_two_ranks(sharded_report, layout):
        assert usual.weights == usual.gradients == here and usual.states == 2 * here
        assert peak <= budget and usual.named > 0.8 * usual.dynamic
        policies.add(policy)
    assert len(policies) == 1 and "Policy()" not in policies


class _Reduce(torch.autograd.Function):
    """The sum over the ranks of a row-parallel product; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


LAYERS = 8
ROWS = 512 * 32 * 4  # bytes of an activation


class RowParallel(nn.Module):
    """Two products with a collective between, and something after it that needs its result."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_Reduce.apply(self.first(x), self.group).tanh())


def _bytes_of_activations() -> int:
    """Return the bytes of all large tensors that Python knows.

    A thread of gloo's may hold that of the last sum for a moment: the least of three counts.
    """
    gc.collect()
    counts = []
    for _ in range(3):
        time.sleep(0.03)
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        storages = {each.data_ptr(): each for each in (x.untyped_storage() for x in tensors)}
        sizes = [storage.nbytes() for storage in storages.values()]
        counts.append(sum(nbytes for nbytes in sizes if nbytes >= ROWS // 2))
        del tensors, storages
    return min(counts)


def row_parallel(
    world: Any, options: dict[str, Any] | None, slices: bool
) -> tuple[int, int, int, list[torch.Tensor]]:
    """Return sums, gathers, bytes held after the forward, and gradients."""
    group = world.group(2)
    torch.manual_seed(0)
    model = nn.Sequential(*(RowParallel(group) for _ in range(LAYERS)))
    if options is not None:
        more = {"recompute_slice_activation": True, "group": group} if slices else {}
        memory.apply(model, memory.Policy(memory.recompute("*", **options, **more)))
    x = torch.randn(512, 32)
    before = _bytes_of_activations()
    loss = model(x).sum()
    dist.barrier(group)
    nbytes = _bytes_of_activations() - before
    del loss
    with Count() as count:
        model(x).sum().backward()
    return count.collectives("reduce"), count.collectives("gather"), nbytes, _gradients(model)


def test_collectives_of_a_region_run_again_or_their_results_are_kept(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    options = (None, {"mp_comm_recompute": True}, {"mp_comm_recompute": False})
    runs = [on_two_ranks(row_parallel, option, False) for option in options]
    for plain, again, kept in zip(*runs, strict=True):
        assert [run[0] for run in (plain, again, kept)] == [LAYERS, 2 * LAYERS, LAYERS]
        assert kept[2] == again[2] + LAYERS * ROWS
        assert_same_bits([again[3], kept[3]], [plain[3], plain[3]])


def test_a_rank_keeps_its_slice_of_a_region_s_input_and_gathers_it(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    runs = [on_two_ranks(row_parallel, {}, slices) for slices in (False, True)]
    for whole, sliced in zip(*runs, strict=True):
        assert whole[1] == 0 and sliced[1] == LAYERS
        # The first layer's input is the caller's, who keeps it; its slice is one more.
        assert whole[2] == (LAYERS - 1) * ROWS and sliced[2] == LAYERS * ROWS // 2
        assert_same_bits(sliced[3], whole[3])


def another_block_reads(_: Any) -> str:
    """Return what a backward says that wants a norm again whose weights FSDP2 has freed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norm = nn.Sequential(nn.Linear(8, 8), fusedops.nn.LayerNorm(8))
    model = nn.Sequential(norm, nn.Linear(8, 8), nn.Linear(8, 8))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    memory.apply(model, memory.Policy(memory.recompute(ops=["layer_norm"])))
    loss = model(torch.randn(4, 8)).square().sum()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_result_whose_weights_are_freed_is_not_made_of_what_lies_there(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    for said in on_two_ranks(another_block_reads):
        assert "layer_norm" in said and "FSDP2 has freed its weight [8]" in said


def model_that_keeps(world: Any, name: str, values: dict[str, Any]) -> int:
    """Return the bytes that layers hold after a forward."""
    if not world.member(2):
        return 0
    config = ParallelConfig(tp=2, recompute="full", **values)
    model: Any = parallelize(Transformer(preset(name), device="meta"), config, seed=0).model
    tokens = torch.arange(4 * 64).view(4, 64) % 100
    x = torch.randn(4, 64 // (2 if config.sp else 1), model.config.hidden_size, requires_grad=True)
    context = model.make_context(tokens)
    dist.barrier(world.group(2))
    before = _bytes_of_activations()
    y, auxiliary = model.layers(x, context)
    dist.barrier(world.group(2))
    nbytes = _bytes_of_activations() - before
    (y.sum() + auxiliary).backward()
    return nbytes


@pytest.mark.ci(every=3)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"sp": True, "overlap": False}),
        ("tiny-llama", {"sp": True}),
        ("tiny-gpt2", {"sp": True}),
        ("tiny-mixtral", {}),
        ("tiny-mixtral", {"sp": True}),
        ("tiny-mixtral", {"sp": True, "overlap": False}),
    ],
    ids=str,
)
def test_the_planner_counts_what_is_kept_of_collectives(
    on_two_ranks: Callable[..., list[Any]], name: str, values: dict[str, Any]
) -> None:
    model = preset(name)
    measured, planned = [], []
    for repeats in (False, True):
        given = {**values, "mp_comm_recompute": repeats}
        measured.append(on_two_ranks(model_that_keeps, name, given))
        shape = Layout.of(precision="float32", seq_len=64, micro_batch=4).training
        layout = Layout(ParallelConfig(tp=2, recompute="full", **given), shape)
        planned.append(sum(layer_bytes(model, layout, i) for i in range(model.num_layers)))
    kept, again = measured
    assert [a - b for a, b in zip(kept, again, strict=True)] == [planned[0] - planned[1]] * 2
