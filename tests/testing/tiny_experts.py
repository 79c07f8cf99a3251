"""A layer of experts in plain torch, and its experts divided over ranks; with bugs to plant."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

EXPERTS = 4


class Experts(nn.Module):
    """Each token goes to the expert that its router likes best."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, hidden, hidden) / 4)
        self.visit = self.compute

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x = x_BSH.flatten(0, 1)
        probs, ids = self.router(x).softmax(-1).max(-1)
        return self.visit(x, probs, ids).view_as(x_BSH)

    def compute(self, x: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the results of the experts here, numbered from 0 on."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        result = torch.zeros_like(x)
        for expert, each in enumerate(weight):
            rows = (ids == expert).nonzero()[:, 0]
            result = result.index_add(0, rows, F.gelu(x[rows] @ each) * probs[rows, None])
        return result


class Exchange(torch.autograd.Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], got: list[int], group: Any) -> Any:
        ctx.way = got, send, group
        return _exchanged(rows, send, got, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _exchanged(grad.contiguous(), *ctx.way), None, None, None


def _exchanged(rows: torch.Tensor, send: list[int], got: list[int], group: Any) -> torch.Tensor:
    arrived = rows.new_empty((sum(got), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows, got, send, group=group)
    return arrived


def divide(layer: Experts, mesh: DeviceMesh, bug: str) -> None:
    """Give each rank its share of a layer's experts; every rank has other tokens."""
    group, ranks = mesh.get_group(), mesh.size()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
    layer.visit = functools.partial(_visit, layer, group, EXPERTS // ranks, bug)


def _visit(
    layer: Experts,
    group: Any,
    per_rank: int,
    bug: str,
    x: torch.Tensor,
    probs: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids // per_rank, minlength=group.size())
    send = counts.tolist()
    got = _exchanged(counts, [1] * len(send), [1] * len(send), group).tolist()
    rows = Exchange.apply(torch.cat([x, probs[:, None]], 1)[order], send, got, group)
    here = _exchanged(ids[order], send, got, group)
    here = here // group.size() if bug == "experts misnumbered" else here % per_rank
    results = layer.compute(rows[:, :-1], rows[:, -1], here)
    back = Exchange.apply(results, got, send, group)
    if bug == "results out of place":
        return back
    return torch.zeros_like(back).index_copy(0, order, back)
