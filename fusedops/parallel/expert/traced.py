"""Dispatch and combine made of operators, one per exchange, and of the sorts between them.

This is what a compiler traces, and what runs eagerly where shapes are static. Over nodes the
operators are the same two, called twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.expert.flat import wants_gradient
from fusedops.parallel.expert.hierarchical import (
    plan_in_node,
    route_to_nodes,
    slots_by_node,
    slots_in_order,
)
from fusedops.parallel.expert.operators import Arrived, Return, Send, moe_return, moe_send


@dataclass(frozen=True, eq=False)
class Hop:
    """One exchange of the way, and the way back; made of tensors and constants.

    Attributes:
        plan: the routing of what left.
        counts: int64 ``[4, ranks]`` on the CPU: rows for and from each rank, and slots.
        anchor: of the graph of gradients.
        level: the place of its group in the way.
    """

    plan: RoutingPlan
    counts: torch.Tensor
    anchor: torch.Tensor
    level: int


@dataclass(frozen=True, eq=False)
class Way:
    """What was dispatched, and the way back.

    Attributes:
        hops: one, or those across and within nodes.
        groups: the names of their groups.
        like: ``[0, H]``, of the dtype and device of the rows.
        nodes: ranks of the first group.
        reduce: where a token's slots are summed.
        max_rows: the bound of the rows, or ``None``.
    """

    hops: tuple[Hop, ...]
    groups: tuple[str, ...]
    like: torch.Tensor
    nodes: int
    reduce: str
    max_rows: int | None

    @property
    def counts(self) -> torch.Tensor:
        """Rows sent to each rank and received from each, of the first exchange."""
        return self.hops[0].counts

    def come_home(self, output: torch.Tensor, *, weighted: bool) -> torch.Tensor:
        """Send the experts' results back and sum the slots of each token."""
        plan = self.hops[0].plan
        if len(self.hops) == 1:
            return moe_unpermute(self._back(output, self.hops[0]), plan, weighted=weighted)
        first, second = self.hops
        rows = self._back(output, second)
        if self.reduce == "node":
            rows = moe_unpermute(rows, second.plan, weighted=weighted)
            order = route_to_nodes(plan, self.nodes).order
            return moe_unpermute(self._back(rows, first), order, weighted=False)
        rows = self._back(rows, first, slots_in_order(second.plan))
        return moe_unpermute(rows, slots_by_node(plan, self.nodes), weighted=weighted)

    def _back(
        self, rows: torch.Tensor, hop: Hop, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        return moe_return(
            Return(
                output=rows,
                anchor=hop.anchor,
                counts=hop.counts,
                like=self.like,
                order=order,
                room=hop.plan.permutation.shape[0],
                max_rows=self.max_rows,
                groups=list(self.groups),
                level=hop.level,
            )
        )


def send(
    op: str,
    input: torch.Tensor,
    plan: RoutingPlan,
    groups: list[dist.ProcessGroup],
    reduce: str,
    payload: str | None,
    max_rows: int | None,
) -> tuple[torch.Tensor, RoutingPlan, torch.Tensor, torch.Tensor, int, Way]:
    """Send each token to the ranks of its experts.

    Returns the rows, their plan, slots that were dropped here and on all ranks, bytes of a row of
    the first exchange, and the way back.
    """
    names = tuple(group.group_name for group in groups)
    hops: list[Hop] = []

    def hop(
        rows: torch.Tensor, plan: RoutingPlan, dropped: torch.Tensor | None
    ) -> tuple[Arrived, torch.Tensor, int]:
        level = len(hops)
        came = moe_send(
            Send(
                input=rows,
                probs=plan.probs,
                expert_ids=plan.expert_ids,
                permutation=plan.permutation,
                positions=plan.positions,
                offsets=plan.offsets,
                dropped=dropped,
                num_experts=plan.num_experts,
                reduce=reduce,
                payload=payload,
                grads=wants_gradient(rows, plan.probs),
                max_rows=max_rows,
                op=op,
                groups=list(names),
                level=level,
            )
        )
        hops.append(Hop(plan, came.counts, came.anchor, level))
        return came, came.dropped.sum(), plan.num_experts // groups[level].size()

    came, dropped, experts = hop(input, plan, None)
    mine = came.dropped[groups[0].rank()]
    if len(groups) > 1:
        inside = plan_in_node(came.ids, came.probs, experts)
        came, dropped, experts = hop(came.rows, inside, dropped)
    # Without a bound every row is real; the rows that fill one up are nobody's.
    kept = None if max_rows is None else came.ids < experts
    local_plan = RoutingPlan(came.ids, came.probs, *moe_sort(came.ids, experts), kept, experts)
    pairs = plan.top_k if len(groups) > 1 else 1
    layout = PayloadLayout(
        input.shape[1], input.dtype, plan.probs.dtype, pairs, payload == "float8"
    )
    way = Way(tuple(hops), names, input.detach()[:0], groups[0].size(), reduce, max_rows)
    return came.rows, local_plan, mine, dropped, layout.stride, way
