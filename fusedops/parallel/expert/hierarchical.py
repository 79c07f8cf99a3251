"""Tokens to the nodes of their experts, once per node, and within the node to the experts.

The first exchange runs between ranks of the same place in different nodes, over the slow links: a
token goes to each node once, with the ids and probabilities of all its slots there. The second runs
within the node, over the fast links, a row per slot. Results return within the node, and then
either slot by slot, summed at home in the order of the slots (the bits of one process), or summed
in the node, which sends a row per token and node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm.host_groups import connect
from fusedops.parallel.expert.all_to_all import FromExperts, Route
from fusedops.parallel.expert.flat import (
    Departure,
    Flat,
    FlatReturn,
    Travel,
    depart,
    wants_gradient,
)


def route_to_nodes(plan: RoutingPlan, nodes: int) -> Route:
    """Return what leaves for the nodes: a packed row per token and node."""
    node, kept = _nodes_of_slots(plan, nodes)
    # The first slot of a token on a node carries the others.
    same = node.unsqueeze(2) == node.unsqueeze(1)
    carrier = same.to(torch.int32).argmax(2)
    first = carrier == torch.arange(plan.top_k, device=node.device)
    order = moe_sort(node, nodes, kept=kept & first)
    carries = RoutingPlan(node, plan.probs, *order, kept & first, nodes)
    row_of_slot = torch.where(kept, order[1].gather(1, carrier), node.numel())
    ids = torch.where(kept, plan.expert_ids, -1)
    return Route(carries, row_of_slot, ids, plan.num_experts // nodes)


def slots_by_node(plan: RoutingPlan, nodes: int) -> RoutingPlan:
    """Return the plan whose rows are all slots by node, token and choice: as results come home."""
    node, kept = _nodes_of_slots(plan, nodes)
    return RoutingPlan(node, plan.probs, *moe_sort(node, nodes, kept=kept), kept, nodes)


def plan_in_node(ids: torch.Tensor, probs: torch.Tensor, experts: int) -> RoutingPlan:
    """Return the routing of a node's tokens over its experts; an id of that many is nobody's."""
    order = moe_sort(ids, experts)
    return RoutingPlan(ids, probs, *order, order[1] < order[3][-1], experts)


def slots_in_order(inside: RoutingPlan) -> torch.Tensor:
    """Return the row of each slot in a node by rank of origin, token and choice, nobody's last.

    That is the order in which home expects them.
    """
    nobody = (inside.positions >= inside.offsets[-1]).to(torch.int32)
    return inside.positions.flatten().index_select(0, moe_sort(nobody, 1)[0])


def depart_within(
    op: str,
    rows: torch.Tensor,
    inside: RoutingPlan,
    groups: Sequence[dist.ProcessGroup],
    *,
    dropped: torch.Tensor,
    **options: Any,
) -> Travel:
    """Send a node's tokens to the ranks of their experts.

    Args:
        op: the function's name, for messages.
        rows: tokens that came over the first exchange.
        inside: their routing in this node.
        groups: across and within nodes.
        dropped: slots dropped on the ranks that the first exchange joined.
        options: of ``depart``, without those that follow from these.
    """
    across, within = groups
    departure = Departure(rows, inside, Route(inside, inside.positions, inside.expert_ids))
    (travel,) = depart(
        op,
        [departure],
        within,
        num_experts=inside.num_experts,
        dropped=dropped,
        faults=torch.zeros_like(dropped),
        across=across,
        **options,
    )
    connect([within, across], rows.device)
    return travel


class Nodes:
    """One chunk of tokens, to the nodes, to the experts, and back."""

    def __init__(
        self,
        op: str,
        travel: Travel,
        within: dist.ProcessGroup,
        *,
        quantized: bool,
        reduce: str,
    ) -> None:
        self.travel = travel
        self._op, self._within = op, within
        self._quantized, self._reduce = quantized, reduce
        self._inside: Any = None

    @property
    def num_dropped(self) -> tuple[int, int]:
        """Dropped slots of this rank and of all ranks."""
        mine = self.travel.agreement.dropped[self.travel.group.rank()]
        return mine, sum(self._inside.travel.agreement.dropped)

    def relay(self) -> None:
        """Wait for the node's tokens and send them to the ranks of their experts."""
        travel = self.travel
        rows, probs, anchor = end(travel.to, travel.ticket)
        second = depart_within(
            self._op,
            rows,
            plan_in_node(travel.ids, probs, travel.experts),
            [travel.group, self._within],
            dropped=rows.new_full((), sum(travel.agreement.dropped), dtype=torch.int64),
            quantized=self._quantized,
            reduce=self._reduce,
            grads=wants_gradient(rows, probs),
            anchor=anchor,
        )
        self._inside = Flat(second, travel.group)

    def arrive(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Wait for the rows; returns them and their routing over the experts here."""
        return self._inside.arrive()

    def send_back(self, output: Any) -> NodesReturn:
        """Begin to send the experts' results."""
        inside = self._inside
        return NodesReturn(
            self.travel, inside.send_back(output), inside.travel, self._reduce == "node"
        )


class NodesReturn:
    """Results on their way within the node, and then home."""

    def __init__(self, travel: Travel, inside: FlatReturn, second: Travel, in_node: bool) -> None:
        self._travel, self._inside, self._second = travel, inside, second
        self._in_node = in_node
        self._crossing: Any = None

    def relay(self, *, weighted: bool) -> None:
        """Wait for the node's results and send them home."""
        travel, here = self._travel, self._second.departure.plan
        rows, anchor = self._inside.arrive()
        room, order = travel.departure.plan.permutation.numel(), None
        if self._in_node:
            rows = moe_unpermute(rows, here, weighted=weighted)
        else:
            order = slots_in_order(here)
        counted = travel.rows if self._in_node else travel.slots
        back = FromExperts(counted, room, travel.group, rows.shape[0], order)
        self._crossing = back, begin(back, rows, anchor=anchor)

    def come_home(self, *, weighted: bool) -> torch.Tensor:
        """Wait, and sum the slots of each token."""
        if self._crossing is None:
            self.relay(weighted=weighted)
        back, ticket = self._crossing
        rows, _ = end(back, ticket)
        departure = self._travel.departure
        if self._in_node:
            return moe_unpermute(rows, departure.route.order, weighted=False)
        assert departure.slots is not None
        return moe_unpermute(rows, departure.slots, weighted=weighted)


def _nodes_of_slots(plan: RoutingPlan, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the node of each slot, ``nodes`` where nobody's, and which are somebody's."""
    kept = plan.positions < plan.offsets[-1]
    # A graph may come here before its operator has looked at the ids: no sort raises on them.
    ids = plan.expert_ids.clamp(0, plan.num_experts)
    node = torch.where(kept, ids // (plan.num_experts // nodes), nodes)
    return node, kept
