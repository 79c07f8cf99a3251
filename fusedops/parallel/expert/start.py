"""The start of a dispatch over one group: checks on all ranks, metadata, packed rows.

What ``dispatcher.py`` does in steps and ``operators.py`` at once begins here. An error of one rank
is sent to all before that rank raises, so that none waits for rows that never come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusedops.ops import RoutingPlan, moe_sort
from fusedops.parallel.collective_errors import ErrorCode
from fusedops.parallel.expert.all_to_all import DispatchAllToAll
from fusedops.parallel.expert.arguments import DispatchOptions, check_on_all
from fusedops.parallel.expert.hierarchical import origin_plan, send_order
from fusedops.parallel.expert.metadata import (
    CallSignature,
    ExchangeCounts,
    Metadata,
    MetadataExchange,
    send_error,
)


class StartedChunk(NamedTuple):
    """A chunk of tokens whose rows are being sent."""

    plan: RoutingPlan
    exchange: DispatchAllToAll
    ticket: Any  # what the function that sends the chunk returned


def start_dispatch(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    send: Callable[[DispatchAllToAll, torch.Tensor, torch.Tensor], Any],
    *,
    grads: bool,
    dropped: torch.Tensor | None = None,
) -> list[StartedChunk]:
    """Exchange the metadata of all chunks at once, then pack and send each.

    Args:
        options: of the dispatch.
        level: the index of the group over which rows are sent.
        input: ``[T, H]``; at level 1 the rows that level 0 received.
        plan: the routing of these.
        send: ``send(exchange, input, probs)`` starts the exchange of a chunk.
        grads: whether autograd will ask for gradients.
        dropped: at level 1: an int64 scalar, the slots dropped on the ranks of level 0.
    """
    plans = [plan]
    faults = plan.offsets.new_zeros(())
    if level == 0:
        check_on_all(options, input, plan)
        faults = _faults(plan)
        plan = _without_rows(plan, faults)
        dropped, plans = plan.num_dropped, _chunks_of(plan, options.chunks)
    assert dropped is not None
    orders = [send_order(options, level, part) for part in plans]
    layout = orders[0].layout(input, quantized=options.quantized)
    carries_slots = level < len(options.groups) - 1 and options.reduce == "source"
    group = options.groups[level]
    metadata = Metadata(
        CallSignature(
            num_experts=plan.num_experts,
            hidden_size=input.shape[1],
            dtype=input.dtype,
            row_bytes=layout.stride,
            requires_grad=grads,
            chunks=len(plans),
            reduce=options.reduce,
            max_rows=-1 if options.max_rows is None else options.max_rows,
            validate=options.validate,
        ),
        rows=[_rows_per_destination(order.plan, group.size()) for order in orders],
        slots=[origin_plan(options, level, part).tokens_per_expert for part in plans]
        if carries_slots
        else [],
        dropped=dropped,
        faults=faults,
    )
    received = MetadataExchange(options.op, group, input.device, metadata)
    parts = input.tensor_split(len(plans)) if len(plans) > 1 else [input]
    started = []
    try:
        for chunk, (part, order) in enumerate(zip(plans, orders, strict=True)):

            def counts(chunk: int = chunk) -> ExchangeCounts:
                return received.wait()[chunk]

            exchange = DispatchAllToAll(options, level, order, layout, counts)
            started.append(StartedChunk(part, exchange, send(exchange, parts[chunk], part.probs)))
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second hop.
        send_error(
            options.op, options.groups[level + 1 :], input.device, error, ErrorCode.OTHER_GROUP
        )
        raise
    return started


def wants_gradient(input: torch.Tensor, probs: torch.Tensor) -> bool:
    """Whether autograd will ask for gradients of what is sent."""
    return torch.is_grad_enabled() and (input.requires_grad or probs.requires_grad)


def _rows_per_destination(plan: RoutingPlan, size: int) -> torch.Tensor:
    """Return how many rows of a plan go to each of ``size`` ranks, int32."""
    per_rank = plan.num_experts // size
    ends = plan.offsets[per_rank - 1 :: per_rank]
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _faults(plan: RoutingPlan) -> torch.Tensor:
    """Return 1 if ids or offsets are out of range, else 0, without waiting for the device."""
    num_slots, ends = plan.permutation.numel(), plan.offsets
    steps = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), num_slots))
    wrong = (steps < 0).any()
    if num_slots > 0:
        for values, last in (
            (plan.expert_ids, plan.num_experts),
            (plan.permutation, num_slots - 1),
            (plan.positions, num_slots - 1),
        ):
            low, high = values.aminmax()
            wrong = wrong | (low < 0) | (high > last)
    return wrong.to(torch.int32)


def _without_rows(plan: RoutingPlan, faults: torch.Tensor) -> RoutingPlan:
    """Return the plan, or where it has faults one of the same shapes that sends nothing.

    Rows are packed before the host knows of the faults, which would read out of bounds.
    """
    names = ("expert_ids", "permutation", "positions", "tokens_per_expert", "offsets")
    fields: dict[str, Any] = {
        name: torch.where(faults > 0, 0, getattr(plan, name)) for name in names
    }
    return replace(plan, **fields)


def _chunks_of(plan: RoutingPlan, chunks: int) -> list[RoutingPlan]:
    """Return the plans of consecutive parts of the tokens."""
    if chunks == 1:
        return [plan]
    kept = plan.positions < plan.offsets[-1]
    ids = torch.where(kept, plan.expert_ids, plan.num_experts).tensor_split(chunks)
    probs = plan.probs.tensor_split(chunks)
    return [
        RoutingPlan(i, p, *moe_sort(i, plan.num_experts), k, plan.num_experts, plan.capacity)
        for i, p, k in zip(ids, probs, kept.tensor_split(chunks), strict=True)
    ]
