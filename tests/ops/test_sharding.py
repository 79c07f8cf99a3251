"""DTensor: every op runs on sharded rows without communication and equals the single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close

from fusedops.specs import Sample, Spec, _routing, all_specs, tensors_in
from fusedops.specs.comparison import baseline, fresh, incoming, run, truth

WORLD = 2


def _distribute(sample: Sample, mesh: Any, placements: dict[tuple[int, ...], Any]) -> Sample:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    first = sample.args[0].shape

    def place(tensor: torch.Tensor) -> Any:
        # What holds one integer per row, as targets do, goes where the row goes.
        by_rows = placements.get(tuple(first)) == Shard(0)
        of_rows = by_rows and not tensor.is_floating_point() and tensor.shape == first[:-1]
        placement = placements.get(tuple(first if of_rows else tensor.shape), Replicate())
        placed = distribute_tensor(tensor.detach(), mesh, [placement])
        return placed.requires_grad_(tensor.requires_grad)

    return sample.map(place)


def _assert_as_one_process(
    spec: Spec, sample: Sample, mesh: Any, placements: dict[Any, Any], expect: Any
) -> None:
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    placed = _distribute(sample, mesh, placements)
    with CommDebugMode() as communication:
        outputs = tensors_in(spec.op(*placed.args, **placed.kwargs))
    counts = communication.get_comm_counts()
    assert communication.get_total_counts() == 0, f"{spec.name} {sample.name}: {counts}"
    for output in outputs:
        assert output.placements == (expect,), f"{spec.name}: {output.placements}"
    grads_out = [
        distribute_tensor(grad, mesh, [expect])
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


def _rows_worker(rank: int, names: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for name in names:
        spec = all_specs()[name]
        for sample in spec.samples(torch.device("cpu"), torch.float32):
            shape = tuple(sample.args[0].shape)
            if sample.random or len(shape) < 2 or shape[0] < WORLD or shape[-1] < 2:
                continue
            if all(output.shape[:1] == shape[:1] for output in run(spec.op, fresh(sample)).outputs):
                _assert_as_one_process(spec, sample, mesh, {shape: Shard(0)}, Shard(0))
            _assert_as_one_process(spec, sample, mesh, {}, Replicate())


# Two parts, for two workers: starting two processes takes longer (8 s of processor time) than ops.
_NAMES = [name for name, spec in all_specs().items() if spec.rows_are_independent]
_PARTS = [_NAMES[i::2] for i in range(2)]


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("names", _PARTS, ids=["even", "odd"])
def test_sharded_rows_need_no_communication(
    names: list[str], on_new_world: Callable[..., Any]
) -> None:
    on_new_world(_rows_worker, names)


def _column_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((5, 12), (8, 12), (8,))]
    sample = Sample("columns", tuple(leaves))
    placements = {(8, 12): Shard(0), (8,): Shard(0)}
    _assert_as_one_process(all_specs()["linear_act"], sample, mesh, placements, Shard(1))
    gated = Sample("columns", (*leaves[:2], torch.randn(8, 12, requires_grad=True)))
    _assert_as_one_process(all_specs()["linear_glu"], gated, mesh, {(8, 12): Shard(0)}, Shard(1))
    shapes = ((4, 6, 8), (8,))
    sample = Sample("bias", tuple(torch.randn(*shape, requires_grad=True) for shape in shapes))
    for dim, of_bias in ((1, {}), (2, {shapes[1]: Shard(0)})):
        placements = {shapes[0]: Shard(dim), **of_bias}
        _assert_as_one_process(all_specs()["bias_gelu"], sample, mesh, placements, Shard(dim))


@pytest.mark.distributed
def test_columns_are_sharded_without_communication(
    on_new_world: Callable[..., Any],
) -> None:
    on_new_world(_column_worker)


def _batch_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    shapes = ((4, 1, 7), (2, 4, 5, 6), (2, 4, 6, 7))
    sample = Sample("heads", tuple(torch.randn(*shape, requires_grad=True) for shape in shapes))
    heads = {shapes[0]: Shard(0), shapes[1]: Shard(1), shapes[2]: Shard(1)}
    _assert_as_one_process(all_specs()["baddbmm"], sample, mesh, heads, Shard(1))
    batch = {shapes[1]: Shard(0), shapes[2]: Shard(0)}
    _assert_as_one_process(all_specs()["baddbmm"], sample, mesh, batch, Shard(0))
    columns = {shapes[0]: Shard(2), shapes[2]: Shard(3)}
    _assert_as_one_process(all_specs()["baddbmm"], sample, mesh, columns, Shard(3))


@pytest.mark.distributed
def test_baddbmm_shards_batch_heads_and_columns_without_communication(
    on_new_world: Callable[..., Any],
) -> None:
    on_new_world(_batch_worker)


def _moe_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    for name in ("moe_permute", "moe_unpermute"):
        spec = all_specs()[name]
        for sample in spec.samples(torch.device("cpu"), torch.float32):
            rows, columns = sample.args[0].shape
            if rows >= WORLD and columns >= WORLD and columns % WORLD == 0:
                _assert_as_one_process(spec, sample, mesh, {(rows, columns): Shard(1)}, Shard(1))
            _assert_as_one_process(spec, sample, mesh, {}, Replicate())

    gathered = torch.ops.fusedops.moe_relayout.default
    wide = torch.randn(6, 8)
    index, inverse = torch.tensor([[3, -1, 5], [-1, -1, -1]]).int().flatten(), torch.arange(6).int()
    whole = gathered(wide, index, inverse)
    for placement in (Shard(1), Replicate()):
        placed_wide = distribute_tensor(wide, mesh, [placement])
        maps = [distribute_tensor(each, mesh, [Replicate()]) for each in (index, inverse)]
        moved = gathered(placed_wide, *maps)
        assert moved.placements == (placement,) and torch.equal(moved.full_tensor(), whole)

    # Parts of the experts' results, as tensor parallel experts give them, are combined as parts.
    spec = all_specs()["moe_unpermute"]
    sample = fresh(spec.samples(torch.device("cpu"), torch.float32)[0])
    parts = torch.randn(WORLD, *sample.args[0].shape)
    placed = _distribute(sample, mesh, {})
    rows = DTensor.from_local(parts[rank], mesh, [Partial()]).requires_grad_()
    output = spec.op(rows, placed.args[1])
    assert output.placements == (Partial(),)
    leaves = [rows, placed.args[1].probs]
    grads = torch.autograd.grad(output.full_tensor().square().sum(), leaves)
    whole = parts.sum(0).requires_grad_()
    alone = spec.op(whole, sample.args[1])
    wanted = torch.autograd.grad(alone.square().sum(), [whole, sample.args[1].probs])
    pairs = zip((output, *grads), (alone, *wanted), strict=True)
    for i, (got, want) in enumerate(pairs):
        assert_close(got.full_tensor(), want.double(), want, f"result {i}", 999)


@pytest.mark.distributed
def test_moe_rows_are_sharded_by_columns_and_summed_in_parts_without_communication(
    on_new_world: Callable[..., Any],
) -> None:
    on_new_world(_moe_worker)


def _experts_worker(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    shapes = ((9, 6), (3, 6, 8), (3, 8))
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    ends = torch.tensor([4, 4, 7], dtype=torch.int32)
    sample = Sample("columns", (x, weight, ends, bias), {"activation": "silu"})
    columns = {shapes[1]: Shard(2), shapes[2]: Shard(1)}
    _assert_as_one_process(all_specs()["grouped_mm"], sample, mesh, columns, Shard(1))
    _assert_as_one_process(all_specs()["grouped_mm"], sample, mesh, {}, Replicate())

    # Tensor parallel experts: a hidden column, its gate and its factor lie on one rank.
    spec = all_specs()["moe_mlp"]
    plan = _routing.plan(9, 2, 3, device=torch.device("cpu"), dtype=torch.float32)
    w1, w2 = (torch.randn(*shape, requires_grad=True) for shape in ((3, 6, 16), (3, 8, 10)))
    sample = Sample("inner", (x, plan, w1, w2), {"interleaved": True})
    _assert_as_one_process(spec, sample, mesh, {}, Replicate())
    _assert_as_one_process(spec, sample, mesh, {(3, 8, 10): Shard(2)}, Shard(1))
    placed = _distribute(sample, mesh, {(3, 6, 16): Shard(2), (3, 8, 10): Shard(1)})
    with CommDebugMode() as communication:
        output = spec.op(*placed.args, **placed.kwargs)
    assert output.placements == (Partial(),) and communication.get_total_counts() == 0
    grads = torch.autograd.grad(output.full_tensor().square().sum(), placed.leaves)
    exact = fresh(sample, torch.float64)
    alone = spec.eager(*exact.args, **exact.kwargs)
    wanted = torch.autograd.grad(alone.square().sum(), exact.leaves)
    for i, (got, want) in enumerate(zip((output, *grads), (alone, *wanted), strict=True)):
        assert_close(got.full_tensor(), want.detach(), want.detach().float(), f"result {i}", 999)


@pytest.mark.distributed
def test_experts_are_sharded_by_columns_and_by_hidden_columns_without_communication(
    on_new_world: Callable[..., Any],
) -> None:
    on_new_world(_experts_worker)
