"""A small layer of experts for the tests: on one process with all tokens, and sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from comparing import assert_close
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fusedops
from fusedops import RoutingPlan
from fusedops._core import dtypes
from fusedops.parallel import expert_parallel

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 24, 20


@dataclass(frozen=True)
class Case:
    """Tokens per rank and choices: what an exchange must survive.

    Attributes:
        tokens: ``tokens(ranks) -> tokens of each rank``.
        choose: ``choose(tokens, num_experts) -> (expert_ids [tokens, k], kept or None)``.
    """

    tokens: Callable[[int], list[int]]
    choose: Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]]


def _even(ranks: int) -> list[int]:
    return [48 // ranks] * ranks


def _uneven(ranks: int) -> list[int]:
    return [5 + 3 * (rank % 3) for rank in range(ranks)]


def _some_empty(ranks: int) -> list[int]:
    return [0 if rank % 2 else 7 for rank in range(ranks)]


def _random(tokens: int, experts: int) -> tuple[torch.Tensor, None]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices, None


def _capacity_one(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, _ = _random(tokens, experts)
    kept = torch.zeros(ids.numel(), dtype=torch.bool)
    for expert in range(experts):
        kept[(ids.flatten() == expert).nonzero()[:1]] = True
    return ids, kept.view_as(ids)


def _sentinels(tokens: int, experts: int) -> tuple[torch.Tensor, None]:
    ids, _ = _random(tokens, experts)
    ids[::2, 1] = experts
    return ids, None


CASES = {
    "random": Case(_even, _random),
    "uneven": Case(_uneven, _random),
    "ranks_without_tokens": Case(_some_empty, _random),
    "no_tokens": Case(lambda ranks: [0] * ranks, _random),
    "one_token": Case(lambda ranks: [1] + [0] * (ranks - 1), _random),
    "one_expert": Case(_uneven, lambda t, e: (torch.full((t, TOP_K), e - 1), None)),
    # All logits equal: every token takes the experts of the lowest indices.
    "ties": Case(_even, lambda t, e: (torch.arange(TOP_K).repeat(t, 1), None)),
    "same_expert_twice": Case(
        _even, lambda t, e: ((torch.arange(t)[:, None] % e // 2).repeat(1, TOP_K), None)
    ),
    "capacity_one": Case(_uneven, _capacity_one),
    "all_dropped": Case(_uneven, lambda t, e: (torch.full((t, TOP_K), e), None)),
    "sentinels": Case(_uneven, _sentinels),
}


@dataclass
class Problem:
    """All tokens of a case, their routing, the experts and the incoming gradient."""

    counts: list[int]
    input: torch.Tensor
    ids: torch.Tensor
    kept: torch.Tensor | None
    probs: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    grad: torch.Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        """Return it with fresh leaves in another dtype."""
        leaves = {name: _leaf(getattr(self, name), dtype) for name in ("input", "w1", "w2")}
        probs = _leaf(self.probs, dtypes.statistics_dtype(dtype))
        return replace(self, probs=probs, grad=self.grad.to(dtype), **leaves)

    def cuts(self, rank: int, ranks: int) -> tuple[slice, slice]:
        """Return which tokens and which experts one rank has."""
        first, per_rank = sum(self.counts[:rank]), self.w1.shape[0] // ranks
        tokens = slice(first, first + self.counts[rank])
        return tokens, slice(rank * per_rank, (rank + 1) * per_rank)

    def part(self, rank: int, ranks: int) -> Problem:
        """Return the tokens and the experts of one rank, with fresh leaves."""
        tokens, experts = self.cuts(rank, ranks)
        cuts = {"input": tokens, "probs": tokens, "w1": experts, "w2": experts}
        leaves = {name: _leaf(getattr(self, name)[cut]) for name, cut in cuts.items()}
        kept = None if self.kept is None else self.kept[tokens]
        return replace(self, ids=self.ids[tokens], kept=kept, grad=self.grad[tokens], **leaves)

    def plan(self, num_experts: int = NUM_EXPERTS) -> RoutingPlan:
        """Return the routing of its tokens."""
        return RoutingPlan.from_choices(self.ids, self.probs, num_experts, kept=self.kept)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What is differentiated."""
        return [self.input, self.probs, self.w1, self.w2]


def _leaf(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_()


def problem(name: str, ranks: int, dtype: torch.dtype) -> Problem:
    """Return a case: the same values on every rank, representable in bfloat16."""
    case = CASES[name]
    counts = case.tokens(ranks)
    tokens = sum(counts)
    ids, kept = case.choose(tokens, NUM_EXPERTS)
    generator = torch.Generator().manual_seed(3)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype)

    return Problem(
        counts,
        new(tokens, HIDDEN),
        ids,
        kept,
        torch.rand(tokens, TOP_K, generator=generator).to(dtypes.statistics_dtype(dtype)),
        new(NUM_EXPERTS, INNER, HIDDEN) * 0.25,
        new(NUM_EXPERTS, HIDDEN, INNER) * 0.25,
        new(tokens, HIDDEN),
    ).to(dtype)


def part_of(name: str, rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Problem:
    """Return what one rank has of a case."""
    return problem(name, ranks, dtype).part(rank, ranks)


def group_of(shape: tuple[int, ...]) -> Any:
    """Return the world as a group, or as a mesh ``[nodes, ranks of a node]``."""
    assert math.prod(shape) == dist.get_world_size()
    if len(shape) == 1:
        return dist.group.WORLD
    return init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))


def experts(
    rows: torch.Tensor, plan: RoutingPlan, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return the experts' result for each slot of ``plan``, in the order of the slots."""
    slots = plan.permutation.long()
    begin, parts = 0, []
    for expert, end in enumerate(plan.offsets.tolist()):
        mine = rows[slots[begin:end] // plan.top_k]
        hidden = fusedops.linear_act(mine, w1[expert], activation="silu")
        parts.append(fusedops.linear_act(hidden, w2[expert], activation="identity"))
        begin = end
    parts.append(rows.new_zeros(len(slots) - begin, w2.shape[1]))
    return torch.zeros_like(torch.cat(parts)).index_copy(0, slots, torch.cat(parts))


def on_one_process(p: Problem) -> torch.Tensor:
    """Run the layer with all tokens and all experts."""
    plan = p.plan()
    slots = experts(p.input, plan, p.w1, p.w2)
    return fusedops.moe_unpermute(slots[plan.permutation.long()], plan)


@functools.cache
def expected(name: str, ranks: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return what one process computes, output and gradients, and the same in float64.

    Ranks that are threads share it: it is computed once.
    """
    found = []
    for whole in (problem(name, ranks, dtype), problem(name, ranks, dtype).to(torch.float64)):
        output = on_one_process(whole)
        found.append([output.detach(), *gradients(output, whole)])
    return found


def gradients(output: torch.Tensor, p: Problem) -> list[torch.Tensor]:
    """Return the gradients of the leaves."""
    return list(torch.autograd.grad(output, p.leaves, p.grad))


def layer(p: Problem, group: Any, **options: Any) -> torch.Tensor:
    """Run the sharded layer on a rank's part."""

    def here(rows: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
        return experts(rows, plan, p.w1, p.w2)

    return expert_parallel(p.input, p.plan(), here, group, weighted=True, **options)


def assert_cases(
    rank: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    options: dict[str, Any],
    names: tuple[str, ...] = tuple(CASES),
) -> None:
    """Assert that a rank has the bits of one process for its tokens.

    Gradients, and sums that a node rounds, lie within the error budget.
    """
    group, ranks = group_of(shape), math.prod(shape)
    for name in names:
        whole = problem(name, ranks, dtype)
        (alone, *its_grads), (truth, *true_grads) = expected(name, ranks, dtype)
        mine = whole.part(rank, ranks)
        output = layer(mine, group, **options)
        tokens, shard = whole.cuts(rank, ranks)
        where = f"{name} on {shape}, {dtype}, {options}"
        depth = len(whole.input) if len(shape) == 1 else 999
        if options.get("reduce") == "node":
            assert_close(output, truth[tokens], alone[tokens], where, depth)
        else:
            assert torch.equal(output, alone[tokens]), f"{where}: other bits"
        parts = (tokens, tokens, shard, shard)
        for i, (grad, part) in enumerate(zip(gradients(output, mine), parts, strict=True)):
            known = true_grads[i][part], its_grads[i][part]
            assert_close(grad, *known, f"{where}: gradient {i}", depth)
