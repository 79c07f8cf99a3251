"""Tokens to the nodes of their experts, once per node, and within the node to the experts.

The first exchange runs between ranks of the same place in different nodes, over the slow links: a
token goes to each node once, with the ids and probabilities of all its slots there. The second runs
within the node, over the fast links, a row per slot. Results return within the node, and then
either slot by slot, summed at home in the order of the slots (the bits of one process), or summed
in the node, which sends a row per token and node.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel._exchange import begin, end
from fusedops.parallel._flat import (
    Departure,
    Flat,
    FlatReturn,
    Travel,
    depart,
    verdict,
    wants_gradient,
)
from fusedops.parallel._hops import FromExperts, Route


def departure_to_nodes(input: torch.Tensor, plan: RoutingPlan, nodes: int) -> Departure:
    """Return what leaves for the nodes: a packed row per token and node."""
    span = plan.num_experts // nodes
    kept = plan.positions < plan.offsets[-1]
    ids = torch.where(kept, plan.expert_ids, -1)
    node = torch.where(kept, plan.expert_ids // span, nodes)
    # The first slot of a token on a node carries the others.
    same = node.unsqueeze(2) == node.unsqueeze(1)
    carrier = same.to(torch.int32).argmax(2)
    first = carrier == torch.arange(plan.top_k, device=node.device)
    order = moe_sort(node, nodes, kept=kept & first)
    positions = order[1]
    carries = RoutingPlan(node, plan.probs, *order, kept & first, nodes)
    row_of_slot = torch.where(kept, positions.gather(1, carrier), node.numel())
    per_node = moe_sort(node, nodes, kept=kept)[2]
    return Departure(input, plan, Route(carries, row_of_slot, ids, span), per_node)


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
        travel, plan = self.travel, self.travel.departure.plan
        rows, probs, anchor = end(travel.to, travel.ticket)
        here = plan.num_experts // travel.group.size()
        ids = travel.to.ids
        ids = torch.where(ids >= 0, ids - travel.group.rank() * here, here)
        order = moe_sort(ids, here)
        inside = RoutingPlan(ids, probs, *order, order[1] < order[3][-1], here)
        dropped = torch.tensor(sum(travel.agreement.dropped), device=ids.device)
        (second,) = depart(
            self._op,
            [Departure(rows, inside, Route(inside, inside.positions, inside.expert_ids))],
            self._within,
            quantized=self._quantized,
            reduce=self._reduce,
            grads=wants_gradient(rows, probs),
            num_experts=here,
            dropped=dropped,
            faults=torch.zeros_like(dropped),
            anchor=anchor,
        )
        self._inside = Flat(second)

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
        problem: Exception | None = None
        try:
            self._inside.agree()
        except (TypeError, ValueError) as error:
            problem = error  # every rank of the node tells its counterparts
        self._verdict = verdict(travel.group, travel.empty, problem)
        if self._in_node:
            counted = travel.rows
            rows = moe_unpermute(rows, here, weighted=weighted)
        else:
            # By rank of origin, token and slot: the order in which home expects them.
            counted = travel.slots
            nobody = (here.positions >= here.offsets[-1]).to(torch.int32)
            kept = moe_sort(nobody, 1)[0][: sum(counted.receive)]
            rows = rows.index_select(0, here.positions.flatten()[kept.long()])
        room = travel.departure.plan.permutation.numel()
        back = FromExperts(counted, room, travel.group)
        self._crossing = back, begin(back, rows, anchor=anchor)

    def come_home(self, *, weighted: bool) -> torch.Tensor:
        """Wait, and sum the slots of each token."""
        if self._crossing is None:
            self.relay(weighted=weighted)
        back, ticket = self._crossing
        rows, _ = end(back, ticket)
        if self._verdict is not None:
            self._verdict.wait()
        route, plan = self._travel.departure.route, self._travel.departure.plan
        if self._in_node:
            return moe_unpermute(rows, route.order, weighted=False)
        nodes = route.order.num_experts
        kept = plan.positions < plan.offsets[-1]
        order = moe_sort(route.order.expert_ids, nodes, kept=kept)
        slots = RoutingPlan(route.order.expert_ids, plan.probs, *order, kept, nodes)
        return moe_unpermute(rows, slots, weighted=weighted)
