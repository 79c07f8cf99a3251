"""Plans for specs: an op that takes a RoutingPlan takes it as an ordinary argument.

``Sample`` sees through pytrees: the generic tests change dtype, strides and leaves of a plan's
tensors as those of any other argument, and ``plan.probs`` is a leaf like ``input``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._core import dtypes
from fusedops.ops import RoutingPlan
from fusedops.specs.make import randint, randn
from fusedops.specs.spec import BadInput, bad_changes

# name -> (expert ids, kept) for given tokens, choices and experts: what routing must survive.
Pattern = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor | None]]

_CPU = torch.device("cpu")


def _distinct(tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Each token's choices differ, as those of a top-k do."""
    columns = max(num_experts, top_k)
    scores = randn(tokens, columns, device=_CPU, dtype=torch.float32, grad=False, key="ids")
    return scores.topk(top_k, dim=1).indices % num_experts


def _half_dropped(tokens: int, top_k: int) -> torch.Tensor:
    return randint(tokens, top_k, high=2, device=_CPU, key="kept") > 0


PATTERNS: dict[str, Pattern] = {
    "random": lambda t, k, e: (_distinct(t, k, e), None),
    "one_expert": lambda t, k, e: (torch.full((t, k), e - 1), None),
    "empty_experts": lambda t, k, e: (_distinct(t, k, e) // 2 * 2 % e, None),
    "sentinels": lambda t, k, e: (_distinct(t, k, e).masked_fill(_half_dropped(t, k), e), None),
    "dropped": lambda t, k, e: (_distinct(t, k, e), _half_dropped(t, k)),
    "all_dropped": lambda t, k, e: (torch.full((t, k), e), None),
}


def choices(
    pattern: str, tokens: int, top_k: int, num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return expert ids (int64) and mask of a pattern on ``device``."""
    ids, kept = PATTERNS[pattern](tokens, top_k, num_experts)
    return ids.to(device), None if kept is None else kept.to(device)


def plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    pattern: str = "random",
    grad: bool = True,
    key: str = "",
) -> RoutingPlan:
    """Return a plan whose ``probs`` are a leaf, for activations of ``dtype``; ``key``: a seed."""
    ids, kept = choices(pattern, tokens, top_k, num_experts, device)
    wide = dtypes.statistics_dtype(dtype)
    probs = randn(tokens, top_k, device=device, dtype=wide, grad=False, key=f"probs{key}")
    made = RoutingPlan.from_choices(ids, torch.sigmoid(probs), num_experts, kept=kept)
    return made.with_probs(made.probs.requires_grad_(grad))


def plans(
    shapes: Sequence[tuple[int, int, int]],
    patterns: Sequence[str] = tuple(PATTERNS),
    **options: Any,
) -> dict[str, RoutingPlan]:
    """Return name -> plan for every pattern at every ``(tokens, top_k, num_experts)``."""
    return {
        f"{pattern}_{tokens}x{top_k}_of_{experts}": plan(
            tokens, top_k, experts, pattern=pattern, **options
        )
        for tokens, top_k, experts in shapes
        for pattern in patterns
    }


def bad_plans(input: torch.Tensor, plan: RoutingPlan) -> list[BadInput]:
    """Return calls ``op(input, plan)`` that must raise, from one that is right."""
    rows = input.shape[0]
    far, below = plan.positions.clone(), plan.positions.clone()
    far[1, 1], below[1, 1] = plan.positions.numel(), -1
    long, ends = plan.positions.long(), plan.offsets.clone()
    ends[-1] = plan.positions.numel() + 1

    bad = bad_changes(input=input, plan=plan)

    def bad_plan(name: str, *mentions: str, error: Any = ValueError, **changes: Any) -> BadInput:
        changed = dataclasses.replace(plan, **changes)
        return bad(
            name, *(f"plan.{field}" for field in changes), *mentions, error=error, plan=changed
        )

    return [
        bad("rows", "plan.num_tokens", f"{rows} rows", str(rows - 1), "input", input=input[1:]),
        bad("dims", "input", "2 dims", input=input[0]),
        bad_plan("past_the_end", str(plan.positions.numel()), positions=far),
        bad_plan("negative", "-1", positions=below),
        bad_plan("wide", "int32", "int64", error=TypeError, positions=long),
        bad_plan("flat", "2 dims", positions=plan.positions[0]),
        bad_plan("ends", str(plan.positions.numel() + 1), offsets=ends),
        bad_plan("no_experts", "at least one expert", offsets=ends[:0]),
    ]
