"""Gradients of experts' weights whose calls are chunks or nodes: summed once, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layer import (
    NUM_EXPERTS,
    Problem,
    problem,
)
from process_pool import World

from fusedops import RoutingPlan, moe_mlp
from fusedops._core import dtypes
from fusedops.parallel import expert_parallel

pytestmark = pytest.mark.distributed
OnRanks = Callable[..., list[Any]]


def _summed_gradients(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Weights' gradients, chunk by chunk, against those of one chunk and against float64."""
    size = math.prod(shape)
    group = world.group(*shape)
    if not world.member(size):
        return
    whole = problem("random", size, dtype)
    per_rank = NUM_EXPERTS // size
    shard = slice(world.rank * per_rank, (world.rank + 1) * per_rank)

    def leaves(p: Problem) -> list[torch.Tensor]:
        both = torch.cat([p.w1, p.w1.flip(0)], 1), p.w2
        biases = p.w1.flip(0).repeat(1, 2, 1)[..., 0], p.w2[..., 0]
        return [each.detach().clone().requires_grad_() for each in (*both, *biases)]

    def run(p: Problem, weights: list[torch.Tensor], layer: Any) -> list[torch.Tensor]:
        first, second, *biases = weights

        def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
            return moe_mlp(rows, plan, first.mT, second.mT, *biases)

        return list(torch.autograd.grad(layer(here), weights, p.grad))

    exact = whole.to(torch.float64)
    doubles = leaves(exact)
    truth = [
        each[shard] for each in run(exact, doubles, lambda here: here(exact.input, exact.plan()))
    ]
    mine = whole.part(world.rank, size)
    weights = [leaf[shard].detach().clone().requires_grad_() for leaf in leaves(whole)]

    def in_chunks(chunks: int) -> list[torch.Tensor]:
        return run(
            mine,
            weights,
            lambda here: expert_parallel(mine.input, mine.plan(), here, group, chunks=chunks),
        )

    alone = in_chunks(1)
    for chunks in (2, 3, 8):
        for i, grads in enumerate(zip(in_chunks(chunks), alone, truth, strict=True)):
            got, want, right = (grad.double() for grad in grads)
            label = f"{chunks} chunks over {shape}, {dtype}, gradient {i}"
            # Another order of a float32 sum, rounded to one or the other side.
            close = dtypes.error_budget(alone[i], want, dtype, depth=len(whole.input))
            assert ((got - want).abs() <= close).all(), f"{label}: rounded more than once"
            error, before = ((each - right).square().mean() for each in (got, want))
            assert error <= 1.05 * before, f"{label}: {error} with chunks, {before} without"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_chunks_do_not_change_the_weights_gradients(
    on_ranks: OnRanks, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    on_ranks(_summed_gradients, shape, dtype)
