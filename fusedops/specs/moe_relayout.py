"""Description of moe_relayout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fusedops.ops import RoutingPlan, moe_relayout
from fusedops.ops.moe_relayout import LAYOUTS
from fusedops.specs import _routing
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor, plan: RoutingPlan, source: str, target: str, *, capacity: int | None = None
) -> torch.Tensor:
    # By slots: where each slot's row stands in either layout, then a gather and a scatter.
    size = plan.capacity if capacity is None else capacity
    kept = plan.positions.flatten() < plan.offsets[-1]
    ids = torch.where(kept, plan.expert_ids.flatten(), plan.num_experts).long()

    def places(layout: str) -> torch.Tensor:
        row = plan.positions.flatten().long()
        if layout == "k_major":
            by_choice = ids.view(plan.positions.shape).t().flatten()
            order = torch.argsort(torch.argsort(by_choice, stable=True))
            row = order.view(plan.top_k, plan.num_tokens).t().flatten()
        elif layout == "capacity":
            assert size is not None
            begin = torch.nn.functional.pad(plan.offsets - plan.tokens_per_expert, (0, 1))
            within = row - begin[ids]
            row = torch.where(within < size, ids * size + within, -1)
        return torch.where(kept, row, -1)

    rows = input.flatten(0, 1) if source == "capacity" else input
    num_rows = plan.num_experts * (size or 0) if target == "capacity" else plan.positions.numel()
    output = input.new_zeros(num_rows + 1, input.shape[-1])
    origins, put = places(source), places(target)
    moved = (origins >= 0) & (put >= 0)
    output = output.index_put((torch.where(moved, put, num_rows)[moved],), rows[origins[moved]])
    output = output[:num_rows]
    if target == "capacity":
        return output.unflatten(0, (plan.num_experts, size or 0))
    return output


def _samples(new: TensorFactory) -> list[Sample]:
    frozen: dict[str, Any] = {**new.place, "grad": False}

    def call(
        name: str, size: int, plan: RoutingPlan, source: str, target: str, capacity: int = 5
    ) -> Sample:
        rows: tuple[int, ...] = (plan.positions.numel(),)
        if source == "capacity":
            rows = (plan.num_experts, capacity)
        chosen = {"capacity": capacity} if "capacity" in (source, target) else {}
        return Sample(name, (new(*rows, size), plan, source, target), chosen)

    plans = {
        pattern: _routing.plan(5, 3, 7, pattern=pattern, **frozen) for pattern in _routing.PATTERNS
    }
    plan = _routing.plan(12, 2, 4, **frozen)
    pairs = [(source, target) for source in LAYOUTS for target in LAYOUTS]
    padded = dataclasses.replace(plan, capacity=7)
    return [
        call("capacity", 8, plan, "token_major", "capacity"),
        *(call("_".join(pair), 8, plans["dropped"], *pair) for pair in pairs),
        *(call(name, 8, plan, "token_major", "capacity") for name, plan in plans.items()),
        *(call(f"{name}_back", 8, plan, "capacity", "k_major") for name, plan in plans.items()),
        Sample("plans_capacity", (new(24, 8), padded, *pairs[2])),
        call("odd_size", 37, plan, "token_major", "capacity"),
        call("long_rows", 1100, _routing.plan(3, 2, 2, **frozen), "token_major", "k_major"),
        call("one", 1, _routing.plan(1, 1, 1, **frozen), "token_major", "capacity", 1),
        call("no_capacity", 8, plan, "token_major", "capacity", 0),
        call("back_from_none", 8, plan, "capacity", "token_major", 0),
        call("no_tokens", 8, _routing.plan(0, 2, 4, **frozen), "token_major", "k_major"),
        call("padding_only", 8, _routing.plan(0, 2, 4, **frozen), "token_major", "capacity"),
        call("no_columns", 0, plan, "token_major", "k_major"),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    plan = _routing.plan(4, 2, 3, device=device, dtype=torch.float32)
    rows, padded = torch.randn(8, 8, device=device), torch.randn(3, 5, 8, device=device)
    back = {"source": "capacity", "target": "token_major", "capacity": 4}
    bad = bad_changes(input=rows, plan=plan, source="token_major", target="capacity")
    return [
        bad("layout", "source", "token_major", source="token"),
        bad("target", "target", "k_major", source="k_major", target="kmajor"),
        bad("rows", "input", "8 rows", input=rows[1:], target="k_major"),
        bad("missing", "capacity", "given"),
        bad("negative", "capacity", "-1", capacity=-1),
        bad("padded", "input", "[3, 4, hidden]", input=padded, **back),
        bad("flat", "input", "[3, 4, hidden]", **back),
    ]


def _case(tokens: int, size: int, top_k: int, experts: int, target: str) -> BenchCase:
    slots = tokens * top_k
    capacity = slots // experts * 5 // 4

    def make(new: TensorFactory) -> Sample:
        plan = _routing.plan(tokens, top_k, experts, **new.place, grad=False)
        chosen = {"capacity": capacity} if target == "capacity" else {}
        return Sample("bench", (new(slots, size), plan, "token_major", target), chosen)

    rows = slots + (experts * capacity if target == "capacity" else slots)
    label = f"{tokens}x{size}, {top_k} of {experts}, {target}"
    return BenchCase.moving(label, make, (rows * size, rows * size))


SPEC = describe(moe_relayout, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 1024, 2, 8, "capacity").headlined(),
        _case(4096, 1024, 2, 8, "k_major"),
        _case(256, 1024, 2, 8, "capacity").headlined(),
    ),
    summary="the experts' rows in another layout: token-major, k-major, padded to a capacity",
    autocast="keep",
    rows_are_independent=False,
)
