"""Description of moe_permute."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fusedops.ops import RoutingPlan, moe_permute
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, describe


def _eager(input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    rows = input[plan.permutation.long() // plan.top_k]
    if plan.kept is None:
        return rows
    real = torch.arange(rows.shape[0], device=rows.device) < plan.offsets[-1]
    return torch.where(real.unsqueeze(1), rows, 0.0)


def _samples(new: TensorFactory) -> list[Sample]:
    frozen: dict[str, Any] = {**new.place, "grad": False}

    def call(name: str, size: int, plan: RoutingPlan) -> Sample:
        return Sample(name, (new(plan.num_tokens, size), plan))

    plans = _routing.plans(((12, 2, 4), (5, 3, 7)), **frozen)
    plan = _routing.plan(12, 2, 4, **frozen)
    return [
        *(call(name, 8, plan) for name, plan in plans.items()),
        call("without_mask", 8, dataclasses.replace(plan, kept=None)),
        call("odd_size", 37, _routing.plan(9, 1, 3, **frozen)),
        call("long_rows", 1100, _routing.plan(3, 2, 2, **frozen)),
        call("many_choices", 5, _routing.plan(6, 12, 12, pattern="dropped", **frozen)),
        call("one", 1, _routing.plan(1, 1, 1, **frozen)),
        call("no_tokens", 8, _routing.plan(0, 2, 4, **frozen)),
        call("no_columns", 0, _routing.plan(4, 2, 4, **frozen)),
        call("no_choices", 8, _routing.plan(4, 0, 4, **frozen)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    plan = _routing.plan(4, 2, 3, device=device, dtype=torch.float32)
    return _routing.bad_plans(torch.randn(4, 8, device=device), plan)


def _case(tokens: int, size: int, top_k: int, experts: int) -> BenchCase:
    def make(new: TensorFactory) -> tuple[Any, ...]:
        plan = _routing.plan(tokens, top_k, experts, **new.place, grad=False)
        return new(tokens, size), dataclasses.replace(plan, kept=None)

    # A token is read once and its rows are written; the backward the other way round.
    label = f"{tokens}x{size}, {top_k} of {experts}"
    elements = ((1 + top_k) * tokens * size, (1 + top_k) * tokens * size)
    return BenchCase.moving(label, make, elements)


SPEC = describe(moe_permute, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 1024, 8, 64).headlined(),
        _case(4096, 2048, 2, 8),
        _case(256, 1024, 8, 64).headlined(),
    ),
    summary="each token's row to its experts, sorted by expert",
    autocast="keep",
    rows_are_independent=False,
    limits=("On CUDA a plan whose positions are no rows is not reported.",),
)
