"""Description of moe_sort."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.ops import moe_sort
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    expert_ids: torch.Tensor, num_experts: int, *, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    ids = expert_ids.flatten()
    if kept is not None:
        ids = ids.masked_fill(~kept.flatten(), num_experts)
    permutation = torch.argsort(ids, stable=True)
    positions = torch.argsort(permutation).view(expert_ids.shape)
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    return tuple(tensor.int() for tensor in (permutation, positions, counts, counts.cumsum(0)))


def _samples(new: TensorFactory) -> list[Sample]:
    made = []
    for tokens, top_k, experts in ((12, 2, 4), (7, 3, 5), (1, 1, 1), (300, 8, 37)):
        for pattern in _routing.PATTERNS:
            ids, kept = _routing.choices(pattern, tokens, top_k, experts, new.device)
            name = f"{pattern}_{tokens}x{top_k}_of_{experts}"
            made.append(Sample(name, (ids, experts), {"kept": kept}))
    ids = new.integers(40, 6, high=7)
    many = new.integers(6000, 4, high=300)
    return [
        *made,
        Sample("int32", (ids.int(), 7)),
        Sample("no_tokens", (ids[:0], 7)),
        Sample("no_choices", (ids[:, :0], 7)),
        Sample("several_tasks", (many, 300), {"kept": many % 5 > 0}),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    ids = torch.zeros(4, 2, dtype=torch.int64, device=device)

    above, below, far = ids.clone(), ids.clone(), ids.clone()
    above[2, 1], below[3, 0], far[0, 0] = 4, -1, 2**32
    mask = ids > 0
    bad = bad_changes(expert_ids=ids, num_experts=3)
    return [
        bad("above", "expert_ids", "[0, 3)", "4", "token 2, choice 1", expert_ids=above),
        bad("below", "expert_ids", "-1", "token 3, choice 0", expert_ids=below.int()),
        bad("wraps", "expert_ids", str(2**32), "token 0", expert_ids=far),
        bad("dims", "expert_ids", "[tokens, top_k]", "[2]", expert_ids=ids[0]),
        bad("none", "num_experts", "at least 1", "0", num_experts=0),
        bad("mask", "kept", "[4, 2]", "[1, 2]", kept=mask[:1]),
    ]


def _case(tokens: int, top_k: int, experts: int) -> BenchCase:
    def make(new: TensorFactory) -> tuple[Any, ...]:
        return new.integers(tokens, top_k, high=experts), experts

    # Ids are read twice, permutation and positions written once.
    moved = (tokens * top_k * (8 + 4 + 4), 0)
    return BenchCase.moving(f"{tokens}x{top_k} of {experts}", make, (0, 0), extra=moved)


SPEC = describe(moe_sort, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(_case(8192, 8, 64).headlined(), _case(8192, 2, 8), _case(4096, 8, 256)),
    summary="stable counting sort of the experts' choices: permutation, counts, offsets",
    autocast="keep",
    rows_are_independent=False,
    double_backward=False,
    limits=(
        "It has no gradient: everything is integer.",
        "On CUDA an id that is no expert is not reported; its slot is dropped.",
    ),
)
