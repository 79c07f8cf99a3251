"""What a step does on GPUs that are not there: the instrument, and the budgets of our own steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fusedops._core.device_tensors import device_tensor, to_device
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.parallel.pipeline.schedules import SCHEDULES
from fusedops.testing import RankError, cluster_step

# Where a host must wait, by design.
ALLOWED = {
    # It sizes the buffers of the tokens that arrive for its experts.
    "fusedops/parallel/expert/metadata.py",
    # It copies the experts that were chosen to the device.
    "fusedops/memory/offloading/experts.py",
    # It scales gradients that are in host memory by a norm to which the device contributes.
    "fusedops/optim/norms.py",
    # It steps the optimizer with gradients that must have arrived.
    "fusedops/optim/offloaded.py",
    "fusedops/optim/_overlap.py",
}


def training_step(
    name: str, config: ParallelConfig, documents: bool = False
) -> Callable[[], Callable[[], None]]:
    """Return what makes a step with clipping, as a training loop runs it."""

    def make() -> Callable[[], None]:
        sizes = replace(preset(name), num_layers=4)
        engine = parallelize(Transformer(sizes, device="meta"), config, device="cuda")
        optimizer = engine.optimizer(lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(sizes.vocab_size, (8, 17), generator=generator)
        rows = engine.rows(tokens.pin_memory().to("cuda", non_blocking=True))
        parts = rows.chunk(config.microbatches)
        ids = [(part[:, :-1] > 100).cumsum(1) if documents else None for part in parts]

        def step() -> None:
            shards = [
                engine.shard_batch(part[:, :-1], part[:, 1:], document_ids=document_ids)
                for part, document_ids in zip(parts, ids, strict=True)
            ]
            count = engine.count(rows[:, 1:])
            losses = engine.step(shards, count)
            engine.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            engine.balance()
            engine.mean_loss(losses, count)

        return step

    return make


LAYOUTS = {
    "one": {},
    "dp": {"dp": 2, "microbatches": 2},
    "tp": {"tp": 2},
    "tp-sp": {"dp": 2, "tp": 2, "sp": True},
    "cp-ring": {"cp": 2},
    "cp-all-to-all": {"cp": 2, "context": "all_to_all"},
    "zero-1": {"dp": 2, "zero": 1},
    "zero-2": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero-3": {"dp": 2, "zero": 3, "shard_threshold": 0},
    "zero-3-tp": {"dp": 2, "tp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": "full"},
    "recompute-tp": {"tp": 2, "sp": True, "recompute": "selective"},
    **{
        f"pp-{schedule}": {"pp": 2, "microbatches": 4, "pipeline_schedule": schedule}
        for schedule in SCHEDULES
    },
    "pp-dp-zero": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2},
    "mixed-precision": {"dp": 2, "zero": 3, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "offload-optimizer": {"offload": "optimizer"},
    "offload-activations": {"offload": "activations"},
}
SPARSE = {
    "ep": {"dp": 2, "ep": 2},
    "ep-chunks": {"dp": 2, "ep": 2, "ep_chunks": 2},
    "ep-tp": {"dp": 2, "ep": 2, "tp": 2},
    "ep-zero": {"dp": 4, "ep": 2, "zero": 1},
    "offload-experts": {"offload": "experts"},
}


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("case", LAYOUTS | SPARSE)
def test_no_host_waits_in_a_step(case: str) -> None:
    name, config = "tiny-pangu-moe" if case in SPARSE else "tiny-llama", (LAYOUTS | SPARSE)[case]
    layout = ParallelConfig(**config)
    step = cluster_step(training_step(name, layout), layout.sizes.ranks)
    assert step.waits(ALLOWED) == {} and step.misplaced == {}, str(step)
    assert step.unconnected == ()
    for rank in step.ranks:
        assert all(made.device == "cuda" for made in rank.communications), str(step)


def test_context_parallelism_reads_the_ends_of_documents_once() -> None:
    layout = ParallelConfig(cp=2)
    step = cluster_step(training_step("tiny-llama", layout, documents=True), 2)
    # Which blocks of other ranks a rank attends to is planned on the host.
    (((_, where), count),) = step.waits().items()
    assert where.startswith("fusedops/parallel/context/core.py:") and count == 1, str(step)


def waits_of(function: Callable[[torch.Tensor], Any]) -> dict[tuple[str, str], int]:
    """Return the waits of a function of a tensor on the device."""

    def make() -> Callable[[], Any]:
        values = torch.ones(4, device="cuda")
        return lambda: function(values)

    return cluster_step(make, 1).waits()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
        lambda x: torch.ones(4).to(x.device, non_blocking=True),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: (
            x.requires_grad_().register_hook(lambda g: print(g.sum().item())) and x[0].backward()
        ),
    ],
)
def test_a_wait_is_found(function: Callable[[torch.Tensor], Any]) -> None:
    ((_, where),) = waits_of(function)
    assert where.startswith("tests/testing/test_cluster_step.py:")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x * torch.tensor(2.0),  # a scalar of the host is an argument
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64, device="cuda")),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
        lambda x: to_device(torch.ones(4), x.device),
        lambda x: device_tensor([1.0], torch.float32, x.device),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.ones(4).tolist(),
        lambda x: x.new_zeros(3) + torch.zeros_like(x)[:3],
        lambda x: torch.zeros(3, device=x.device) + x[:3],
        lambda x: x.to(torch.bfloat16).double().clone(),
        lambda x: x.to(None, torch.bfloat16, False),  # as Module.to(dtype) calls it
    ],
)
def test_what_does_not_wait_is_none(function: Callable[[torch.Tensor], Any]) -> None:
    assert waits_of(function) == {}


def test_tensors_of_host_and_device_in_one_operator_are_found() -> None:
    step = cluster_step(lambda: lambda: torch.ones(2, device="cuda") + torch.ones(2), 1)
    ((operator, where),) = step.misplaced
    assert operator == "aten::add" and "test_cluster_step.py" in where


def test_devices_answer_as_gpus() -> None:
    seen = []

    def make() -> Callable[[], None]:
        x = torch.zeros(1, device="cuda")
        module = torch.nn.Linear(2, 2, device="cuda")
        loss = module(torch.ones(1, 2, device="cuda")).sum()
        loss.backward()
        grad = module.weight.grad
        assert grad is not None and grad.device == x.device and grad.is_cuda
        assert (x + 1).is_cuda and x.cpu().device.type == "cpu" and torch.cuda.is_available()
        seen.append((x.device, torch.cuda.current_device(), torch.cuda.device_count()))
        return lambda: None

    cluster_step(make, 3, gpus_per_node=2)
    assert sorted(str(device) for device, *_ in seen) == ["cuda:0", "cuda:0", "cuda:1"]
    assert all(device.index == index and count == 2 for device, index, count in seen)
    assert not torch.cuda.is_available() and not torch.zeros(1).is_cuda


def test_copies_and_streams_are_recorded_in_threads_of_a_rank_too() -> None:
    def make() -> Callable[[], None]:
        x = torch.ones(4, device="cuda")

        def copy() -> None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)

        def step() -> None:
            thread = threading.Thread(target=copy)
            thread.start()
            thread.join()

        return step

    step = cluster_step(make, 1)
    assert list(step.copies.values()) == [16]
    assert [event.what for event in step.ranks[0].events] == ["Stream.wait_stream", "copy to host"]


def test_communication_has_group_bytes_and_caller() -> None:
    def make() -> Callable[[], None]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = pairs[dist.get_rank() % 2]
        x = torch.ones(8, device="cuda")
        return lambda: dist.all_reduce(x, group=mine)

    step = cluster_step(make, 4, gpus_per_node=2)
    (made,) = step.ranks[3].communications
    assert (made.kind, made.ranks, made.nbytes, made.dtype) == ("all_reduce", (1, 3), 32, "float32")
    assert made.device == "cuda" and "test_cluster_step.py" in made.where
    assert step.bytes_across_nodes() == 32
    assert "across nodes" in str(step)


def test_messages_between_hosts_are_waits() -> None:
    step = cluster_step(lambda: lambda: dist.all_reduce(torch.ones(2)), 2)
    ((what, _),) = step.waits()
    assert what == "all_reduce of hosts"


def test_another_group_of_the_same_ranks_is_not_connected() -> None:
    def make() -> Callable[[], None]:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x, group=first)
        if dist.get_rank() == 0:
            return lambda: dist.send(x, 1, group=second)
        return lambda: dist.recv(x, 0, group=second)

    step = cluster_step(make, 2)
    assert step.unconnected == ((0, 1),) and "first communication is a transfer" in str(step)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="make must be a function"):
        cluster_step(1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        cluster_step(lambda: lambda: None, 0)
    with pytest.raises(RankError, match="what make returns must be a function"):
        cluster_step(lambda: None, 1)  # type: ignore[arg-type, return-value]
