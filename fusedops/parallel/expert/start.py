"""A dispatch over one group: checks on all ranks, metadata, packed rows.

What ``dispatcher.py`` does in steps and ``operators.py`` at once is this. An error of one rank is
sent to all before that rank raises, so that none waits for rows that never come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fusedops.ops import RoutingPlan, moe_sort
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.collective_errors import ErrorCode
from fusedops.parallel.expert.all_to_all import DispatchAllToAll
from fusedops.parallel.expert.arguments import DispatchOptions, check_on_all
from fusedops.parallel.expert.hierarchical import origin_plan, send_order
from fusedops.parallel.expert.metadata import (
    CallSignature,
    MetadataExchange,
    message,
    send_error,
)


class DispatchResults(NamedTuple):
    """What arrives of a dispatch over one group."""

    rows: torch.Tensor  # ``[R, H]``, those for this rank
    probs: torch.Tensor  # ``[R, pairs]``; a row to a node carries all slots of its token there
    # ``[R, pairs]`` int32, from 0 for the first expert of the rank (at level 0 of two: of the
    # node); their number stands for no expert
    ids: torch.Tensor
    # Int64 ``[4, ranks]`` on the CPU: rows for and from each rank, slots for and from each,
    # where a row carries several
    counts: torch.Tensor
    dropped: torch.Tensor  # int64 ``[ranks]`` on the CPU, slots dropped on each
    anchor: torch.Tensor  # of the autograd graph


# The plan of a chunk of tokens whose rows are being sent, and what waits for what arrives.
StartedChunk = tuple[RoutingPlan, Callable[[], DispatchResults]]


def start_dispatch(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    *,
    grads: bool,
    dropped: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
) -> list[StartedChunk]:
    """Exchange the metadata of all chunks at once, then pack and send each.

    Args:
        options: of the dispatch.
        level: the index of the group over which rows are sent.
        input: ``[T, H]``; at level 1 the rows that level 0 received.
        plan: the routing of these.
        grads: whether autograd will ask for gradients.
        dropped: at level 1: an int64 scalar, the slots dropped on the ranks of level 0.
        anchor: at level 1: that of level 0.
    """
    plans, faults = [plan], plan.offsets.new_zeros(())
    if level == 0:
        check_on_all(options, input, plan)
        faults = _faults(plan)
        plan = _without_rows(plan, faults)
        dropped, plans = plan.num_dropped, _chunks_of(plan, options.chunks)
    assert dropped is not None
    orders = [send_order(options, level, part) for part in plans]
    layout = orders[0].layout(input, quantized=options.quantized)
    signature = CallSignature(
        num_experts=plan.num_experts,
        hidden_size=input.shape[1],
        dtype=input.dtype,
        row_bytes=layout.stride,
        requires_grad=grads,
        chunks=len(plans),
        reduce=options.reduce,
    )
    group, slots = options.groups[level], []
    if level < len(options.groups) - 1 and options.reduce == "source":
        slots = [origin_plan(options, level, part).tokens_per_expert for part in plans]
    rows = [_rows_per_destination(order.plan, group.size()) for order in orders]
    sent = message(group.size(), signature, rows, slots, dropped.to(input.device), faults)
    metadata = MetadataExchange(options.op, group, sent, len(plans))
    parts = input.tensor_split(len(plans)) if len(plans) > 1 else [input]
    started: list[StartedChunk] = []
    try:
        for chunk, (part, order) in enumerate(zip(plans, orders, strict=True)):
            exchange = DispatchAllToAll(group, order, layout, partial(metadata.of_chunk, chunk))
            ticket = begin(exchange, parts[chunk], part.probs, anchor=anchor)
            started.append((part, partial(_wait, exchange, ticket)))
    except (TypeError, ValueError) as error:
        # Ranks of this node that have other counterparts wait in the second hop.
        send_error(
            options.op, options.groups[level + 1 :], input.device, error, ErrorCode.OTHER_GROUP
        )
        raise
    return started


def _wait(exchange: DispatchAllToAll, ticket: torch.Tensor) -> DispatchResults:
    rows, probs, anchor = end(exchange, ticket)
    row_counts, slot_counts, dropped = exchange.get_counts()
    counts = torch.tensor([*row_counts, *slot_counts])
    return DispatchResults(rows, probs, exchange.ids, counts, torch.tensor(dropped), anchor)


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
