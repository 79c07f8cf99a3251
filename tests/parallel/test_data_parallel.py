"""Gradients of ranks that see other tokens: their sum, when it is made, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import full_tensor
from process_pool import World
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fusedops.optim import AdamW, OffloadedAdamW, clip_grad_norm_
from fusedops.parallel import BucketedAllReduce
from fusedops.parallel.comm import collectives
from fusedops.parallel.data.ddp import by_bytes, local_bytes
from fusedops.parallel.data.fsdp import shard
from fusedops.parallel.data.grad_sync import GradientSync
from fusedops.testing import threads

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]
RANKS = 8
MICROBATCHES = 2


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return layers of odd sizes, one of which is frozen, and one that no token meets."""
    torch.manual_seed(1)
    layers = [nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers).to(dtype)
    model[2].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(5, dtype=dtype))
    return model


def _batches(rank: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 7, generator=generator, dtype=dtype) for _ in range(MICROBATCHES)]


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def _alone(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model with the gradients of one process that sees all tokens."""
    model = _model(dtype)
    for rank in range(RANKS):
        for batch in _batches(rank, dtype):
            _loss(model, batch).backward()
    return model


def _assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    others = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        grad, wanted = parameter.grad, others[name].grad
        assert (grad is None) == (wanted is None), name
        if grad is not None:
            torch.testing.assert_close(full_tensor(grad), wanted, msg=name)


def _train(
    model: nn.Module, data: GradientSync, rank: int, dtype: torch.dtype = torch.float64
) -> collectives.Log:
    with collectives.recorded() as log:
        for i, batch in enumerate(_batches(rank, dtype)):
            data.begin(last=i == MICROBATCHES - 1)
            _loss(model, batch).backward()
    return log


def _replicas(world: World, limit: int, overlap: bool) -> dict[str, int]:
    model = _model()
    buckets = by_bytes(model.parameters(), limit)
    data = GradientSync([BucketedAllReduce(buckets, world.group(RANKS), overlap=overlap)])
    log = _train(model, data, world.rank)
    _assert_same_gradients(model, _alone())
    return log.counts() | {"bytes": log.bytes()}


@pytest.mark.parametrize(("limit", "buckets"), [(1, 6), (1000, 3), (1 << 20, 1)])
def test_replicas_sum_once_a_step_in_so_many_buckets(
    on_ranks: OnRanks, limit: int, buckets: int
) -> None:
    """Gradients are those of one process, and each number of them travels once."""
    numbers = sum(
        parameter.numel() for parameter in _model().parameters() if parameter.requires_grad
    )
    parameters = sum(each.requires_grad for each in _model().parameters())
    sent = 2 * 8 * (numbers + parameters) * (RANKS - 1) // RANKS
    for counts in on_ranks(_replicas, limit, True):
        assert counts["all_reduce"] == buckets
        assert sent - buckets <= counts["bytes"] <= sent


def test_buckets_are_measured_in_the_bytes_that_are_reduced() -> None:
    """Half-precision gradients are sums of float32."""
    for dtype in (torch.float32, torch.bfloat16):
        layers = [nn.Parameter(torch.ones(10, dtype=dtype)) for _ in range(4)]
        assert [len(bucket) for bucket in by_bytes(layers, 80)] == [2, 2]


def _order(world: World, overlap: bool) -> bool:
    """Return whether the last layer's sum began before the first layer's backward."""
    model = _model()
    BucketedAllReduce(by_bytes(model.parameters(), 1), world.group(RANKS), overlap=overlap)
    hidden = model[0](_batches(world.rank)[0])

    def mark(grad: torch.Tensor) -> None:
        with collectives.computing("first layer"):
            pass

    hidden.register_hook(mark)
    with collectives.recorded() as log:
        model[1:](hidden).sum().backward()
    labels = [event.label for event in log.events if event.phase == "start"]
    return "gradients 1" in labels[: labels.index("first layer")]


@pytest.mark.parametrize("overlap", [True, False])
def test_sums_run_beside_the_backward_if_asked(on_ranks: OnRanks, overlap: bool) -> None:
    assert set(on_ranks(_order, overlap)) == {overlap}


def _versions(world: World) -> list[int]:
    """Return how often the sums of a backward were seen to write to each gradient."""
    model, arrived = nn.Linear(3, 2), {}
    parameters = list(model.parameters())
    BucketedAllReduce([parameters], world.group(RANKS))
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda p: arrived.__setitem__(p, (p.grad, p.grad._version))
        )
    model(torch.ones(1, 3)).sum().backward()
    assert all(parameter.grad is arrived[parameter][0] for parameter in parameters)
    return [parameter.grad._version - arrived[parameter][1] for parameter in parameters]


def test_sums_count_as_writes_to_gradients(on_ranks: OnRanks) -> None:
    """By that an optimizer that steps in the backward knows that its gradient was not the sum."""
    assert all(min(versions) > 0 for versions in on_ranks(_versions))


def _uneven(world: World) -> list[bool]:
    """Ranks use other layers: what one has a gradient of, all have; what none has, none."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    BucketedAllReduce([[each.weight for each in layers]], world.group(RANKS))
    used = layers[0] if world.rank < 3 else layers[1]
    for each in layers:
        nn.init.eye_(each.weight)
    used(torch.ones(1, 2)).sum().backward()
    for layer, ranks in zip(layers, (3, 5, 0), strict=True):
        grad = layer.weight.grad
        assert ranks == 0 if grad is None else torch.equal(grad, torch.full((2, 2), float(ranks)))
    return [each.weight.grad is not None for each in layers]


def test_a_gradient_that_one_rank_has_all_have(on_ranks: OnRanks) -> None:
    assert all(answer == [True, True, False] for answer in on_ranks(_uneven))


def _half(world: World) -> bool:
    """Gradients 1, 2^-9, ... of bfloat16: their sum in bfloat16 would lose all but the first."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    BucketedAllReduce([[weight]], world.group(RANKS))
    factor = 1.0 if world.rank == 0 else 2.0**-9
    (weight * factor).sum().backward()
    expected = torch.tensor(1 + 7 * 2.0**-9).bfloat16()
    assert expected != 1
    return bool((weight.grad == expected).all())


def test_half_precision_is_summed_in_float32(on_ranks: OnRanks) -> None:
    assert all(on_ranks(_half))


class _Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def _interrupted(
    rank: int, stage: int, options: dict[str, bool], failing: int, of_optimizer: bool
) -> None:
    """Make a step one of whose backwards raises between two buckets, and then the step again."""
    model, data = _model(), GradientSync(stage=stage)
    if stage:
        shard([[model[0], model[2]], model], init_device_mesh("cpu", (RANKS,)), stage=stage)
        data.sharded = [model]
    else:
        buckets = by_bytes([p for p in model.parameters() if p.requires_grad], 1)
        data.reducers = [BucketedAllReduce(buckets, dist.group.WORLD, **options)]
    batches, optimizer = _batches(rank), torch.optim.SGD(model.parameters())
    owner = optimizer if of_optimizer else model
    for i in range(failing):
        data.begin(last=False)
        _loss(model, batches[i]).backward()
    data.begin(last=failing == MICROBATCHES - 1)
    hook = model[2].register_forward_hook(lambda module, inputs, output: _Raises.apply(output))
    with pytest.raises(MemoryError):
        _loss(model, batches[failing]).backward()
    hook.remove()
    owner.zero_grad()
    _train(model, data, rank)
    _assert_same_gradients(model, _alone())


@pytest.mark.parametrize("failing", range(MICROBATCHES))
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (0, {"overlap": False}), (0, {"ordered": True}), (1, {}), (2, {}), (3, {})],
    ids=str,
)
def test_a_step_after_a_backward_that_raised_is_that_of_one_process(
    stage: int, options: dict[str, bool], failing: int
) -> None:
    for of_optimizer in (False, True):  # whose zero_grad discards the incomplete gradients
        threads.run(_interrupted, RANKS, stage, options, failing, of_optimizer)


def _sharded(world: World, stage: int) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = _model()
    ignored = {model[4].bias, model.unused}
    blocks = [[model[0], model[2]], model]
    shard(blocks, mesh, stage=stage, ignored_params=ignored)
    reducer = BucketedAllReduce([list(ignored)], world.group(RANKS))
    data = GradientSync([reducer], [model], stage)
    log = _train(model, data, world.rank)
    _assert_same_gradients(model, _alone())
    assert local_bytes(model[0].weight) == 8 * 16 * 7 // RANKS
    return log.counts()


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"), [(1, 2, 2), (2, 2, 4), (3, 6, 4)], ids=["1", "2", "3"]
)
def test_stages_communicate_when_they_must(
    on_ranks: OnRanks, stage: int, gathers: int, scatters: int
) -> None:
    """Two blocks, two micro-batches; with stage 3 one of them is gathered for the backward too."""
    wanted = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": 1}
    for counts in on_ranks(_sharded, stage):
        assert counts == wanted


def _offloaded(world: World, stage: int) -> None:
    weights = []
    for kind in (AdamW, OffloadedAdamW):
        model = _model(torch.float32)
        data = GradientSync(stage=stage)
        if stage:
            mesh = init_device_mesh("cpu", (RANKS,))
            shard([model], mesh, stage=stage)
            data.sharded = [model]
        else:
            data.reducers = [
                BucketedAllReduce(by_bytes(model.parameters(), 1000), world.group(RANKS))
            ]
        optimizer = kind(model.parameters(), lr=0.1, eps=1e-3, master_weights=True)
        for _ in range(2):
            _train(model, data, world.rank, torch.float32)
            clip_grad_norm_(model.parameters(), 1.0)  # after steps have begun
            optimizer.step()
            optimizer.zero_grad()
        weights.append([full_tensor(parameter) for parameter in model.parameters()])
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
    for mine, theirs in zip(*weights, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage", [0, 2])
def test_offloaded_states_step_to_the_same_bits(on_ranks: OnRanks, stage: int) -> None:
    on_ranks(_offloaded, stage)


def _unsharded(world: World) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model: Any = nn.Linear(4 * RANKS, 4 * RANKS, dtype=torch.float64)
    weight = model.weight.detach().clone()
    shard([model], mesh, stage=3)
    model.unshard(async_op=True).wait()
    assert torch.equal(model.weight, weight)


def test_weights_are_there_after_an_asynchronous_unshard(on_ranks: OnRanks) -> None:
    on_ranks(_unsharded)


def test_wrong_arguments_say_what_was_wanted() -> None:
    with pytest.raises(
        TypeError, match=r"BucketedAllReduce: group must be a .*ProcessGroup, got int"
    ):
        BucketedAllReduce([], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shard: stage must be 1, 2 or 3, got 0"):
        shard([], None, stage=0)  # type: ignore[arg-type]


def test_a_gpu_sums_natively_unless_it_shall_be_deterministic() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert collectives.sums_in_order(cpu) and not collectives.sums_in_order(gpu)
    torch.use_deterministic_algorithms(True)
    try:
        assert collectives.sums_in_order(gpu)
    finally:
        torch.use_deterministic_algorithms(False)


def _scattered(rank: int, ordered: bool) -> tuple[torch.Tensor, int]:
    tensor = torch.arange(24.0).view(2, 4, 3).mul(rank + 1).transpose(0, 2)  # not contiguous
    with collectives.recorded() as log:
        result = collectives.reduce_scatter(tensor, dist.group.WORLD, dim=1, ordered=ordered)
        return result.wait(), log.bytes()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_native_reduce_scatter_has_the_sums_of_an_ordered_one(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sums_in_order", lambda device: False)
    unused = "reduce_scatter_single" if ordered else "all_to_all_single"
    monkeypatch.setattr(collectives if ordered else dist, unused, None)
    whole = torch.arange(24.0).view(2, 4, 3).transpose(0, 2) * 3
    for rank, (part, sent) in enumerate(threads.run(_scattered, 2, ordered)):
        assert torch.equal(part, whole.chunk(2, 1)[rank]) and sent == 24 * 4 // 2


def _evaluated_before_a_step(rank: int, stage: int) -> None:
    model, x = nn.Linear(7, 4, bias=False), torch.ones(1, 7)
    shard([model], init_device_mesh("cpu", (2,)), stage=stage)
    (weight,) = model.parameters()
    with torch.no_grad():
        before = model(x)
        weight.mul_(2.0)  # as an optimizer, which has the sharded weight
        assert torch.equal(model(x), 2.0 * before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_alone_keeps_no_weights_for_the_next(stage: int) -> None:
    threads.run(_evaluated_before_a_step, 2, stage)


def _gradients_sharded(rank: int, ordered: bool) -> None:
    model = _model()
    shard([model], init_device_mesh("cpu", (RANKS,)), stage=2, ordered=ordered)
    _train(model, GradientSync(sharded=[model], stage=2), rank)
    _assert_same_gradients(model, _alone())


@pytest.mark.parametrize("ordered", [False, True])
def test_sharded_gradients_are_summed_natively(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sums_in_order", lambda device: False)
    unused = "reduce_scatter_single" if ordered else "ordered_sum"
    monkeypatch.setattr(collectives, unused, None)
    threads.run(_gradients_sharded, RANKS, ordered)


def _mixed(rank: int, stage: int, reduce_dtype: torch.dtype | None) -> None:
    """Compare with products of rounded weights, and with sums in the dtype of the reduction."""
    ranks, half = dist.get_world_size(), torch.bfloat16
    model, rounded = _model(torch.float32), _model(torch.float32).to(half)
    shard(
        [model],
        init_device_mesh("cpu", (ranks,)),
        stage=stage,
        param_dtype=half,
        reduce_dtype=reduce_dtype,
    )
    data = GradientSync(sharded=[model], stage=stage)
    log = _train(model, data, rank, torch.float32)
    numbers = sum(parameter.numel() for parameter in rounded.parameters())
    gathers = [e for e in log.events if e.kind == "all_gather" and e.phase == "start"]
    assert 2 * numbers // ranks <= gathers[0].bytes < 2 * numbers // ranks + 64
    sums: dict[str, torch.Tensor] = {}
    for i in range(MICROBATCHES):
        for other in range(ranks):
            rounded.zero_grad()
            _loss(rounded, _batches(other, torch.float32)[i].to(half)).backward()
            for name, parameter in rounded.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0.0) + parameter.grad.double()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if name in sums:
            found, expected = full_tensor(parameter.grad), sums[name]
            assert found.dtype == torch.float32
            error = (found.double() - expected).norm() / expected.norm()
            assert (error < 1e-6) == (reduce_dtype == torch.float32), (name, error)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_in_half_precision_with_sums_in_float32(
    stage: int, reduce_dtype: torch.dtype | None
) -> None:
    threads.run(_mixed, 2, stage, reduce_dtype)
