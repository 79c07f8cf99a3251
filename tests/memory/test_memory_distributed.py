"""Policies between processes: DDP, FSDP2, and what a second forward does with communication."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import CHECKED, encoder, encoder_loss, gpt2, language_loss
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import memory
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.planner import Layout
from fusedops.planner.memory import layer_bytes

pytestmark = pytest.mark.distributed

POLICIES: dict[str, Callable[[], memory.Policy]] = {
    "recompute": lambda: memory.Policy(memory.recompute("*")),
    "selective": lambda: memory.Policy(memory.recompute("*"), memory.save(ops="attention")),
    "offload": lambda: memory.Policy(memory.offload("*")),
    "both": lambda: memory.Policy(memory.recompute("*"), memory.offload("*")),
    "by op": lambda: memory.Policy(memory.recompute(ops=["layer_norm", "add_layer_norm"])),
    "gathered": lambda: memory.Policy(
        memory.recompute("*", parallel_optimizer_comm_recompute=False)
    ),
}


class Count(TorchDispatchMode):
    """Counts collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        full = getattr(parameter.grad, "full_tensor", None)
        found.append(full() if full is not None else parameter.grad.clone())
    return found


def _assert_equal(found: list[list[torch.Tensor]], plain: list[list[torch.Tensor]]) -> None:
    """Compare the gradients of all ranks, to the bit."""
    for mine, wanted in zip(found, plain, strict=True):
        assert len(mine) == len(wanted) and all(map(torch.equal, mine, wanted))


def _steps(wrapped: nn.Module, world: Any) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    for _ in range(2):
        encoder_loss(wrapped).backward()
    return _gradients(wrapped)


def under_ddp(world: Any, policy: str | None) -> list[torch.Tensor]:
    model = encoder()
    if policy is not None:
        memory.apply(model, POLICIES[policy](), offload_settings=CHECKED)
    return _steps(DistributedDataParallel(model), world)


def under_fsdp(world: Any, policy: str | None, first: bool) -> list[torch.Tensor]:
    model = encoder()
    if policy is not None and first:
        memory.apply(model, POLICIES[policy](), offload_settings=CHECKED)
    for layer in model:
        # A layer's last norm is read by the next one: made again, it needs its weights then.
        fully_shard(layer, reshard_after_forward=policy != "by op")
    fully_shard(model)
    if policy is not None and not first:
        memory.apply(model, POLICIES[policy](), offload_settings=CHECKED)
    return _steps(model, world)


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload", "both", "by op"])
def test_gradients_keep_their_bits_under_ddp(
    on_two_ranks: Callable[..., list[Any]], policy: str
) -> None:
    _assert_equal(on_two_ranks(under_ddp, policy), on_two_ranks(under_ddp, None))


@pytest.mark.parametrize("first", [True, False], ids=["applied before", "applied after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_keep_their_bits_under_fsdp(
    on_two_ranks: Callable[..., list[Any]], policy: str, first: bool
) -> None:
    _assert_equal(on_two_ranks(under_fsdp, policy, first), on_two_ranks(under_fsdp, None, True))


def patched_under_fsdp(world: Any, policy: str | None) -> list[torch.Tensor]:
    """Return the gradients of a patched GPT-2, cut by FSDP2, under autocast."""
    model = gpt2(layers=2)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    if policy is not None:
        name = "transformer.h.*"
        rules = {
            "both": [memory.recompute(name), memory.offload(name)],
            "selective": [memory.recompute(name), memory.save(ops="attention")],
            "by op": [memory.recompute(ops=["layer_norm", "add_layer_norm"])],
        }
        memory.apply(model, memory.Policy(*rules[policy]), offload_settings=CHECKED)
    torch.manual_seed(world.rank)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model)
        loss.backward()
    return _gradients(model)


@pytest.mark.parametrize("policy", ["both", "selective", "by op"])
def test_a_patched_gpt2_keeps_its_bits_under_fsdp_and_autocast(
    on_two_ranks: Callable[..., list[Any]], policy: str
) -> None:
    found = on_two_ranks(patched_under_fsdp, policy)
    _assert_equal(found, on_two_ranks(patched_under_fsdp, None))
    assert all(any(bool(each.any()) for each in gradients) for gradients in found)


def gathers(world: Any, again: bool) -> int:
    """Return how many gathers of weights a step under FSDP2 makes."""
    model = encoder(layers=3)
    rule = memory.recompute("*", parallel_optimizer_comm_recompute=again)
    memory.apply(model, memory.Policy(rule))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with Count() as count:
        encoder_loss(model).backward()
    return sum(n for name, n in count.calls.items() if "allgather" in name or "all_gather" in name)


def test_weights_are_gathered_again_in_the_backward_or_not(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    assert on_two_ranks(gathers, True) == [6, 6]
    assert on_two_ranks(gathers, False) == [3, 3]


def sharded_report(world: Any, layout: str) -> dict[str, Any]:
    """Return what ``report`` and ``fit`` find of a model that is cut, and what is there."""
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
    budget = usual.weights + usual.states + int(0.75 * usual.dynamic)
    torch.distributed.broadcast(shared := torch.tensor(budget), 0)
    chosen = memory.fit(model, batch, int(shared), optimizer=optimizer)
    return {
        "weights": usual.weights,
        "states": usual.states,
        "here": sum(parameter.to_local().nbytes for parameter in model.parameters()),
        "gradients": usual.gradients,
        "named": usual.named / usual.dynamic,
        "policy": str(chosen.policy),
        "peak": chosen.peak,
        "budget": int(shared),
    }


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["fsdp2", "tensor parallel"])
def test_a_rank_learns_its_own_bytes_and_all_choose_one_policy(
    on_two_ranks: Callable[..., list[Any]], layout: str
) -> None:
    first, second = on_two_ranks(sharded_report, layout)
    for each in (first, second):
        assert each["weights"] == each["gradients"] == each["here"]
        assert each["states"] == 2 * each["here"]
        assert each["peak"] <= each["budget"]
        assert each["named"] > 0.8
    assert first["policy"] == second["policy"] != "Policy()"


class _Reduce(torch.autograd.Function):
    """The sum over the ranks of a row-parallel product; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        import torch.distributed._functional_collectives as functional

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
    """Return the bytes of all large tensors that Python knows."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    memory = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(nbytes for nbytes in memory.values() if nbytes >= ROWS // 2)


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
    dist.barrier(group)  # until then a thread of gloo's may hold the last sum's tensor
    nbytes = _bytes_of_activations() - before
    del loss
    with Count() as count:
        model(x).sum().backward()
    sums = sum(n for name, n in count.calls.items() if "reduce" in name)
    gathers = sum(n for name, n in count.calls.items() if "gather" in name)
    return sums, gathers, nbytes, _gradients(model)


def test_collectives_of_a_region_run_again_or_their_results_are_kept(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    plain = on_two_ranks(row_parallel, None, False)
    again = on_two_ranks(row_parallel, {"mp_comm_recompute": True}, False)
    kept = on_two_ranks(row_parallel, {"mp_comm_recompute": False}, False)
    for rank in range(2):
        sums = [run[rank][0] for run in (plain, again, kept)]
        assert sums == [LAYERS, 2 * LAYERS, LAYERS]
        assert kept[rank][2] == again[rank][2] + LAYERS * ROWS
        for run in (again, kept):
            _assert_equal([run[rank][3]], [plain[rank][3]])


def test_a_rank_keeps_its_slice_of_a_region_s_input_and_gathers_it(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    whole = on_two_ranks(row_parallel, {}, False)
    sliced = on_two_ranks(row_parallel, {}, True)
    for rank in range(2):
        assert whole[rank][1] == 0 and sliced[rank][1] == LAYERS
        # The first layer's input is the caller's, who keeps it; its slice is one more.
        assert whole[rank][2] == (LAYERS - 1) * ROWS
        assert sliced[rank][2] == LAYERS * ROWS // 2
        _assert_equal([sliced[rank][3]], [whole[rank][3]])


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
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


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
