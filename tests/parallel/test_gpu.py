"""Expert parallelism on GPUs, over NCCL: one process on one device, which is its own peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fusedops import RoutingPlan
from fusedops.parallel import expert_parallel

pytestmark = pytest.mark.gpu


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _group(nodes: bool) -> Any:
    names = ("node", "local")
    return init_device_mesh("cuda", (1, 1), mesh_dim_names=names) if nodes else dist.group.WORLD


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("payload", [None, "float8"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_values_and_gradients_are_those_without_an_exchange(
    chunks: int, payload: str | None, nodes: bool
) -> None:
    ids = torch.rand(50, 8, device="cuda").topk(2).indices
    x = torch.randn(50, 64, device="cuda").bfloat16().requires_grad_()
    probs = torch.rand(50, 2, device="cuda", requires_grad=True)
    scales = torch.arange(1, 9, device="cuda")

    def experts(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return rows * scales[plan.expert_ids.long()].to(rows.dtype)

    plan = RoutingPlan.from_choices(ids, probs, 8)
    output = expert_parallel(
        x, plan, experts, _group(nodes), weighted=True, chunks=chunks, payload=payload
    )
    grads = torch.autograd.grad(output.float().square().sum(), [x, probs])
    weight = (probs * scales[ids]).sum(1, keepdim=True)
    expected = x.float() * weight
    exact = torch.autograd.grad(expected.square().sum(), [x, probs])
    tolerance = 2.0**-4 if payload else 2.0**-7
    for got, want in zip((output, *grads), (expected, *exact), strict=True):
        assert (got.float() - want.float()).norm() <= 2 * tolerance * want.float().norm()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("nodes", [False, True])
def test_one_graph_gives_the_bits_of_eager(nodes: bool) -> None:
    group = _group(nodes)
    ids = torch.rand(50, 8, device="cuda").topk(2).indices
    x = torch.randn(50, 64, device="cuda").bfloat16().requires_grad_()
    probs = torch.rand(50, 2, device="cuda", requires_grad=True)

    def layer(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        plan = RoutingPlan.from_choices(ids, probs, 8)
        return expert_parallel(x, plan, lambda rows, _: rows * 3, group, weighted=True)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output = function(x, probs)
        results.append([output, *torch.autograd.grad(output.float().sum(), [x, probs])])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)
