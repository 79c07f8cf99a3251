"""Description of moe_unpermute."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fusedops.ops import RoutingPlan, moe_unpermute
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(input: torch.Tensor, plan: RoutingPlan, *, weighted: bool = True) -> torch.Tensor:
    # As transformers' grouped path: weights in the dtype of the rows, a gather, a sum.
    positions, probs = plan.positions, plan.probs.to(input.dtype)
    if plan.kept is not None:
        input = torch.where(plan.kept.flatten()[plan.permutation.long()].unsqueeze(1), input, 0.0)
        probs = torch.where(plan.kept, probs, 0.0)
    if weighted:
        input = input * probs.flatten()[plan.permutation.long()].unsqueeze(1)
    rows = input[positions.flatten().long()]
    return rows.view(*positions.shape, input.shape[1]).sum(dim=1)


def _samples(new: TensorFactory) -> list[Sample]:
    def call(name: str, size: int, plan: RoutingPlan, **kwargs: Any) -> Sample:
        rows = plan.num_tokens * plan.top_k
        return Sample(name, (new(rows, size), plan), kwargs)

    plans = _routing.plans(((12, 2, 4), (5, 3, 7)), **new.place)
    complete, dropped = plans["random_12x2_of_4"], plans["dropped_12x2_of_4"]
    frozen = dropped.with_probs(dropped.probs.detach())
    return [
        *(call(name, 8, plan) for name, plan in plans.items()),
        call("without_mask", 8, dataclasses.replace(complete, kept=None)),
        call("unweighted", 8, frozen, weighted=False),
        call("frozen_router", 8, frozen),
        call("odd_size", 37, _routing.plan(9, 1, 3, **new.place)),
        call("long_rows", 1100, _routing.plan(3, 2, 2, **new.place)),
        call("many_choices", 5, _routing.plan(6, 12, 12, pattern="dropped", **new.place)),
        call("one", 1, _routing.plan(1, 1, 1, **new.place)),
        call("no_tokens", 8, _routing.plan(0, 2, 4, **new.place)),
        call("no_columns", 0, _routing.plan(4, 2, 4, **new.place)),
        call("no_choices", 8, _routing.plan(4, 0, 4, **new.place)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    plan = _routing.plan(4, 2, 3, device=device, dtype=torch.float32)
    rows = torch.randn(8, 8, device=device)
    narrow = dataclasses.replace(plan, probs=plan.probs[:, :1])
    integers = dataclasses.replace(plan, probs=plan.probs.int())
    bad = bad_changes(input=rows, plan=plan)
    return [
        *_routing.bad_plans(rows, plan),
        bad("probs", "plan.probs", "[4, 2]", "[4, 1]", plan=narrow),
        bad("probs_dtype", "plan.probs", "int32", error=TypeError, plan=integers),
    ]


def _case(tokens: int, size: int, top_k: int, experts: int) -> BenchCase:
    def make(new: TensorFactory) -> tuple[Any, ...]:
        plan = _routing.plan(tokens, top_k, experts, **new.place)
        return new(tokens * top_k, size), dataclasses.replace(plan, kept=None)

    # The rows are read and the tokens written; the backward reads both and writes the rows.
    label = f"{tokens}x{size}, {top_k} of {experts}"
    elements = ((1 + top_k) * tokens * size, (1 + 2 * top_k) * tokens * size)
    return BenchCase.moving(label, make, elements)


SPEC = describe(moe_unpermute, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 1024, 8, 64).headlined(),
        _case(4096, 2048, 2, 8),
        _case(256, 1024, 8, 64).headlined(),
    ),
    summary="the experts' rows back to their tokens: weighted sum in slot order",
    autocast="keep",
    rows_are_independent=False,
    limits=("On CUDA a plan whose positions are no rows is not reported.",),
)
