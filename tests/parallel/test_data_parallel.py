"""Gradients of ranks that see other tokens: their sum, when it is made, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import full_tensor
from run_ranks import on_threads
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fusedops.optim import AdamW, OffloadedAdamW, clip_grad_norm_
from fusedops.parallel import BucketedAllReduce
from fusedops.parallel.comm import collectives
from fusedops.parallel.data.ddp import by_bytes, local_bytes
from fusedops.parallel.data.fsdp import shard
from fusedops.parallel.data.grad_sync import GradientSync

pytestmark = pytest.mark.distributed
OnProcesses = Callable[..., list[Any]]
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


def _synced(
    model: Any, stage: int, limit: int = 1, whole: bool = False, **options: Any
) -> GradientSync:
    """Let a model be of replicas (stage 0) or sharded, in two blocks or as a ``whole``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not stage:
        buckets = by_bytes(trained, limit)
        return GradientSync([BucketedAllReduce(buckets, dist.group.WORLD, **options)])
    blocks = [model] if whole else [[model[0], model[2]], model]
    shard(blocks, init_device_mesh("cpu", (dist.get_world_size(),)), stage=stage, **options)
    return GradientSync(sharded=[model], stage=stage)


@pytest.mark.parametrize(("limit", "buckets"), [(1, 6), (1000, 3), (1 << 20, 1)])
@on_threads(RANKS)
def test_replicas_sum_once_a_step_in_so_many_buckets(rank: int, limit: int, buckets: int) -> None:
    """Gradients are those of one process, and each number of them travels once."""
    model = _model()
    log = _train(model, _synced(model, 0, limit), rank)
    _assert_same_gradients(model, _alone())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    sent = 2 * 8 * (numbers + len(trained)) * (RANKS - 1) // RANKS
    assert log.counts()["all_reduce"] == buckets
    assert sent - buckets <= log.bytes() <= sent


def test_buckets_are_measured_in_the_bytes_that_are_reduced() -> None:
    """Half-precision gradients are sums of float32."""
    for dtype in (torch.float32, torch.bfloat16):
        layers = [nn.Parameter(torch.ones(10, dtype=dtype)) for _ in range(4)]
        assert [len(bucket) for bucket in by_bytes(layers, 80)] == [2, 2]


@pytest.mark.parametrize("overlap", [True, False])
@on_threads(RANKS)
def test_sums_run_beside_the_backward_if_asked(rank: int, overlap: bool) -> None:
    """The last layer's sum begins before the first layer's backward."""
    model = _model()
    BucketedAllReduce(by_bytes(model.parameters(), 1), dist.group.WORLD, overlap=overlap)
    hidden = model[0](_batches(rank)[0])

    def mark(grad: torch.Tensor) -> None:
        with collectives.computing("first layer"):
            pass

    hidden.register_hook(mark)
    with collectives.recorded() as log:
        model[1:](hidden).sum().backward()
    labels = [event.label for event in log.events if event.phase == "start"]
    assert ("gradients 1" in labels[: labels.index("first layer")]) == overlap


def _versions(rank: int) -> list[int]:
    """Return how often the sums of a backward were seen to write to each gradient."""
    model, arrived = nn.Linear(3, 2), {}
    parameters = list(model.parameters())
    BucketedAllReduce([parameters], dist.group.WORLD)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda p: arrived.__setitem__(p, (p.grad, p.grad._version))
        )
    model(torch.ones(1, 3)).sum().backward()
    assert all(parameter.grad is arrived[parameter][0] for parameter in parameters)
    return [parameter.grad._version - arrived[parameter][1] for parameter in parameters]


def test_sums_count_as_writes_to_gradients(on_processes: OnProcesses) -> None:
    """By that an optimizer that steps in the backward knows that its gradient was not the sum."""
    assert all(min(versions) > 0 for versions in on_processes(_versions, 2))


@on_threads(RANKS)
def test_a_gradient_that_one_rank_has_all_have(rank: int) -> None:
    """Ranks use other layers: what one has a gradient of, all have; what none has, none."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    BucketedAllReduce([[each.weight for each in layers]], dist.group.WORLD)
    used = layers[0] if rank < 3 else layers[1]
    for each in layers:
        nn.init.eye_(each.weight)
    used(torch.ones(1, 2)).sum().backward()
    for layer, ranks in zip(layers, (3, 5, 0), strict=True):
        grad = layer.weight.grad
        assert ranks == 0 if grad is None else torch.equal(grad, torch.full((2, 2), float(ranks)))
    assert [each.weight.grad is not None for each in layers] == [True, True, False]


@on_threads(RANKS)
def test_half_precision_is_summed_in_float32(rank: int) -> None:
    """Gradients 1, 2^-9, ... of bfloat16: their sum in bfloat16 would lose all but the first."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    BucketedAllReduce([[weight]], dist.group.WORLD)
    factor = 1.0 if rank == 0 else 2.0**-9
    (weight * factor).sum().backward()
    expected = torch.tensor(1 + 7 * 2.0**-9).bfloat16()
    assert expected != 1
    assert bool((weight.grad == expected).all())


class _Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError


@pytest.mark.parametrize("failing", range(MICROBATCHES))
@pytest.mark.parametrize("of_optimizer", [False, True])
@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (0, {"overlap": False}), (0, {"ordered": True}), (1, {}), (2, {}), (3, {})],
    ids=str,
)
@on_threads(RANKS)
def test_a_step_after_a_backward_that_raised_is_that_of_one_process(
    rank: int, stage: int, options: dict[str, bool], failing: int, of_optimizer: bool
) -> None:
    """A backward raises between two buckets; ``zero_grad`` discards incomplete gradients."""
    model = _model()
    data = _synced(model, stage, **options)
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


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"), [(1, 2, 2), (2, 2, 4), (3, 6, 4)], ids=["1", "2", "3"]
)
@on_threads(RANKS)
def test_stages_communicate_when_they_must(
    rank: int, stage: int, gathers: int, scatters: int
) -> None:
    """Two blocks, two micro-batches; with stage 3 one of them is gathered for the backward too."""
    model = _model()
    ignored = {model[4].bias, model.unused}
    data = _synced(model, stage, ignored_params=ignored)
    data.reducers = [BucketedAllReduce([list(ignored)], dist.group.WORLD)]
    log = _train(model, data, rank)
    _assert_same_gradients(model, _alone())
    assert local_bytes(model[0].weight) == 8 * 16 * 7 // RANKS
    wanted = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": 1}
    assert log.counts() == wanted


def _offloaded(rank: int, stage: int) -> None:
    weights = []
    for kind in (AdamW, OffloadedAdamW):
        model = _model(torch.float32)
        data = _synced(model, stage, 1000, whole=True)
        optimizer = kind(model.parameters(), lr=0.1, eps=1e-3, master_weights=True)
        for _ in range(2):
            _train(model, data, rank, torch.float32)
            clip_grad_norm_(model.parameters(), 1.0)  # after steps have begun
            optimizer.step()
            optimizer.zero_grad()
        weights.append([full_tensor(parameter) for parameter in model.parameters()])
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
    for mine, theirs in zip(*weights, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage", [0, 2])
def test_offloaded_states_step_to_the_same_bits(on_processes: OnProcesses, stage: int) -> None:
    on_processes(_offloaded, 2, stage)


def _unsharded(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model: Any = nn.Linear(4 * RANKS, 4 * RANKS, dtype=torch.float64)
    weight = model.weight.detach().clone()
    shard([model], mesh, stage=3)
    model.unshard(async_op=True).wait()
    assert torch.equal(model.weight, weight)


def test_weights_are_there_after_an_asynchronous_unshard(on_processes: OnProcesses) -> None:
    on_processes(_unsharded, RANKS)


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


@pytest.mark.parametrize("ordered", [False, True])
@on_threads(2)
def test_a_native_reduce_scatter_has_the_sums_of_an_ordered_one(
    rank: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sums_in_order", lambda device: False)
    unused = "reduce_scatter_single" if ordered else "all_to_all_single"
    monkeypatch.setattr(collectives if ordered else dist, unused, None)
    numbers = torch.arange(24.0).view(2, 4, 3).transpose(0, 2)  # not contiguous
    given = (numbers * (rank + 1)).transpose(0, 2).contiguous().transpose(0, 2)
    with collectives.recorded() as log:
        result = collectives.reduce_scatter(given, dist.group.WORLD, dim=1, ordered=ordered)
        assert torch.equal(result.wait(), 3 * numbers.chunk(2, 1)[rank])
    assert log.bytes() == 24 * 4 // 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_threads(2)
def test_a_forward_alone_keeps_no_weights_for_the_next(rank: int, stage: int) -> None:
    model, x = nn.Linear(7, 4, bias=False), torch.ones(1, 7)
    shard([model], init_device_mesh("cpu", (2,)), stage=stage)
    (weight,) = model.parameters()
    with torch.no_grad():
        before = model(x)
        weight.mul_(2.0)  # as an optimizer, which has the sharded weight
        assert torch.equal(model(x), 2.0 * before)


@pytest.mark.parametrize("ordered", [False, True])
@on_threads(RANKS)
def test_sharded_gradients_are_summed_natively(
    rank: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "sums_in_order", lambda device: False)
    monkeypatch.setattr(collectives, "reduce_scatter_single" if ordered else "ordered_sum", None)
    model = _model()
    _train(model, _synced(model, 2, whole=True, ordered=ordered), rank)
    _assert_same_gradients(model, _alone())
