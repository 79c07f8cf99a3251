"""DTensor: ops run on shards without communication, or sum numbers, and equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import assert_close
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fusedops
from fusedops import moe_route, moe_router_loss
from fusedops.specs import Sample, Spec, _routing, all_specs, tensors_in
from fusedops.specs.comparison import baseline, fresh, incoming, run, truth
from fusedops.specs.make import TensorFactory
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
WORLD, CPU = 2, torch.device("cpu")
new = TensorFactory(CPU, torch.float32)
Placements = dict[tuple[int, ...], Any]  # shape of a tensor -> its placement; others are replicated


def on_ranks(function: Callable[[DeviceMesh, int], None]) -> None:
    """Call a function with a mesh of all ranks and the rank, on each rank."""
    threads.run(lambda rank: function(init_device_mesh("cpu", (WORLD,)), rank), WORLD)


def placed_as(tensor: torch.Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    """Return a DTensor of values that the ranks, which are threads, do not share."""
    own = tensor.detach().clone()
    return distribute_tensor(own, mesh, [placement]).requires_grad_(tensor.requires_grad)


def distributed(sample: Sample, mesh: DeviceMesh, placements: Placements) -> Sample:
    first = sample.args[0].shape

    def place(tensor: torch.Tensor) -> Any:
        # What holds one integer per row, as targets do, goes where the row goes.
        by_rows = placements.get(tuple(first)) == Shard(0)
        of_rows = by_rows and not tensor.is_floating_point() and tensor.shape == first[:-1]
        placement = placements.get(tuple(first if of_rows else tensor.shape), Replicate())
        return placed_as(tensor, mesh, placement)

    return sample.map(place)


def assert_as_one_process(
    spec: Spec, sample: Sample, mesh: DeviceMesh, placements: Placements, expect: Any
) -> None:
    """Compare a call of DTensors that communicates nothing, whose outputs have a placement."""
    placed = distributed(sample, mesh, placements)
    with CommDebugMode() as communication:
        outputs = tensors_in(spec.op(*placed.args, **placed.kwargs))
    counts = communication.get_comm_counts()
    assert communication.get_total_counts() == 0, f"{spec.name} {sample.name}: {counts}"
    for output in outputs:
        assert output.placements == (expect,), f"{spec.name}: {output.placements}"
    grads_out = [
        placed_as(grad, mesh, expect)
        for grad in incoming(tuple(output.full_tensor() for output in outputs))
    ]
    grads = torch.autograd.grad(outputs, placed.leaves, grads_out) if placed.leaves else ()
    exact, eager = truth(spec, sample), baseline(spec, fresh(sample))
    alone = run(spec.op, fresh(sample))
    for i, output in enumerate(outputs):
        assert torch.equal(output.full_tensor(), alone.outputs[i]), f"{spec.name} output {i}"
    for i, (grad, terms) in enumerate(zip(grads, spec.depth(sample).gradients, strict=True)):
        name = f"{spec.name} gradient {i}"
        assert_close(grad.full_tensor(), exact.grads[i], eager.grads[i], name, terms)


@pytest.mark.ci(every=4)
@pytest.mark.parametrize(
    "name", [name for name, spec in all_specs().items() if spec.rows_are_independent]
)
def test_rows_are_sharded(name: str) -> None:
    spec = all_specs()[name]

    def on_rank(mesh: DeviceMesh, rank: int) -> None:
        for sample in spec.samples(CPU, torch.float32):
            shape = tuple(sample.args[0].shape)
            if sample.random or len(shape) < 2 or shape[0] < WORLD or shape[-1] < 2:
                continue
            if all(output.shape[:1] == shape[:1] for output in run(spec.op, fresh(sample)).outputs):
                assert_as_one_process(spec, sample, mesh, {shape: Shard(0)}, Shard(0))
            assert_as_one_process(spec, sample, mesh, {}, Replicate())

    on_ranks(on_rank)


ENDS = torch.tensor([4, 4, 7], dtype=torch.int32)
PLAN = _routing.plan(9, 2, 3, device=CPU, dtype=torch.float32)
# Arguments of the cases: the shapes of their tensors stand for them.
LINEAR = (new(5, 12), new(8, 12), new(8))
BIASED = (new(4, 6, 8), new(8))
BATCHES = (new(4, 1, 7), new(2, 4, 5, 6), new(2, 4, 6, 7))
GROUPS = (new(9, 6), new(3, 6, 8), ENDS, new(3, 8))
EXPERTS = (new(9, 6), PLAN, new(3, 6, 16), new(3, 8, 10))
# Label, which begins with the op's name -> arguments, placements, and that of the result.
CASES: dict[str, tuple[tuple[Any, ...], Placements, Any]] = {
    "linear_act, columns": (LINEAR, {(8, 12): Shard(0), (8,): Shard(0)}, Shard(1)),
    "bias_gelu, sequence": (BIASED, {(4, 6, 8): Shard(1)}, Shard(1)),
    "baddbmm, heads": (
        BATCHES,
        {(4, 1, 7): Shard(0), (2, 4, 5, 6): Shard(1), (2, 4, 6, 7): Shard(1)},
        Shard(1),
    ),
    "grouped_mm, columns": (GROUPS, {(3, 6, 8): Shard(2), (3, 8): Shard(1)}, Shard(1)),
    "moe_mlp, columns": (EXPERTS, {(3, 8, 10): Shard(2)}, Shard(1)),
}
OPTIONS = {"grouped_mm": {"activation": "silu"}, "moe_mlp": {"interleaved": True}}


@pytest.mark.parametrize("label", CASES)
def test_columns_heads_and_batches_are_sharded(label: str) -> None:
    args, placements, expect = CASES[label]
    name = label.split(",")[0]
    sample = Sample(label, args, OPTIONS.get(name, {}))
    on_ranks(
        lambda mesh, _: assert_as_one_process(all_specs()[name], sample, mesh, placements, expect)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_sharded_rows_reduces_numbers_only(reduction: str) -> None:
    logits, target = new(7, 33), torch.arange(7)
    target[:3] = -100  # the ranks count differently
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction}
    want = fusedops.cross_entropy(logits, target, **options)
    (want_grad,) = torch.autograd.grad(want, logits)

    def on_rank(mesh: DeviceMesh, rank: int) -> None:
        placed, where = (placed_as(each, mesh, Shard(0)) for each in (logits, target))
        with CommDebugMode() as communication:
            loss = fusedops.cross_entropy(placed, where, **options)
            whole = loss.full_tensor()
        counts = {str(op): n for op, n in communication.get_comm_counts().items()}
        assert set(counts) == {"c10d_functional.all_reduce"}, counts  # of numbers, not of logits
        (grad,) = torch.autograd.grad(loss, placed)
        assert grad.placements == (Shard(0),)
        torch.testing.assert_close(whole, want.detach())
        torch.testing.assert_close(grad.full_tensor(), want_grad)

    on_ranks(on_rank)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_routers_loss_over_a_group_is_that_of_the_whole_batch(compiled: bool) -> None:
    torch.manual_seed(3)
    logits = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    ids = moe_route(logits, 2).expert_ids
    whole = moe_router_loss(logits, ids, balance=0.7, z=0.1)
    (want,) = torch.autograd.grad(whole, logits)
    z_loss = moe_router_loss(logits, balance=0.0, z=0.1).detach()
    function = torch.compile(moe_router_loss, backend="aot_eager") if compiled else moe_router_loss

    def on_rank(rank: int) -> None:
        mine = slice(0, 20) if rank == 0 else slice(20, 50)  # ranks hold unequal parts
        part, group = logits.detach()[mine].requires_grad_(), dist.group.WORLD
        loss = function(part, ids[mine], balance=0.7, z=0.1, group=group)
        (grad,) = torch.autograd.grad(loss, part)
        assert_close(grad / WORLD, want[mine], want[mine], "gradient", 50)
        alone = moe_router_loss(part, balance=0.0, z=0.1, group=group)
        for mine_alone, wanted in ((loss, whole.detach()), (alone, z_loss)):
            mean = mine_alone.detach().clone()
            dist.all_reduce(mean)
            assert_close(mean / WORLD, wanted, wanted, "mean over ranks", 50)

    threads.run(on_rank, WORLD)
