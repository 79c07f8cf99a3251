"""Hierarchical all-to-all: the plans of an exchange between nodes and one within the node.

The first hop joins the ranks of the same place in different nodes, over the slow links: a token is
sent to each node once, with the ids and probabilities of all its slots there. The second hop stays
within the node, over the fast links, and sends a row per slot. Results return within the node, and
then either slot by slot, summed at the origin in the order of the slots (the bits of one process),
or summed in the node, which sends a row per token and node (``reduce="node"``).

The functions here are the sorts between the exchanges; ``dispatcher.py`` runs the exchanges. A
dispatch over one group has a single level, which sends a row per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedops.ops import RoutingPlan, moe_sort
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.expert.arguments import DispatchOptions


@dataclass(frozen=True)
class SendOrder:
    """Which packed rows a rank sends, and in which order."""

    plan: RoutingPlan  # the plan whose rows, in order, are the packed rows
    # ``[T, k]`` int32, the packed row that carries each slot; for a slot that is not sent a
    # number beyond the last row
    row_of_slot: torch.Tensor
    expert_ids: torch.Tensor  # ``[T, k]`` int32, packed with the rows
    num_experts: int  # of each destination
    joins_slots: bool = False  # whether a row carries all slots of its token for a destination

    def layout(self, input: torch.Tensor, *, quantized: bool = False) -> PayloadLayout:
        """Return the layout of the packed rows."""
        pairs = self.plan.top_k if self.joins_slots else 1
        dtype = self.plan.probs.dtype
        return PayloadLayout(input.shape[1], input.dtype, dtype, pairs, quantized)


def send_order(options: DispatchOptions, level: int, plan: RoutingPlan) -> SendOrder:
    """Return what is sent over a group of the dispatch."""
    ranks = options.groups[level].size()
    if level < len(options.groups) - 1:
        return _order_to_nodes(plan, ranks)
    return SendOrder(plan, plan.positions, plan.expert_ids, plan.num_experts // ranks)


def origin_plan(options: DispatchOptions, level: int, plan: RoutingPlan) -> RoutingPlan:
    """Return the routing by which the results that return over a group are summed."""
    if level == len(options.groups) - 1:
        return plan
    nodes = options.groups[level].size()
    if options.reduce == "node":
        return _order_to_nodes(plan, nodes).plan
    # All slots by node, token and choice: the order of results.
    node, kept = _nodes_of_slots(plan, nodes)
    return RoutingPlan(node, plan.probs, *moe_sort(node, nodes, kept=kept), kept, nodes)


def _order_to_nodes(plan: RoutingPlan, nodes: int) -> SendOrder:
    """Return what is sent to the nodes: a packed row per token and node."""
    node, kept = _nodes_of_slots(plan, nodes)
    # The first slot of a token on a node carries the others.
    same = node.unsqueeze(2) == node.unsqueeze(1)
    carrier = same.to(torch.int32).argmax(2)
    first = carrier == torch.arange(plan.top_k, device=node.device)
    order = moe_sort(node, nodes, kept=kept & first)
    rows = RoutingPlan(node, plan.probs, *order, kept & first, nodes)
    row_of_slot = torch.where(kept, order[1].gather(1, carrier), node.numel())
    ids = torch.where(kept, plan.expert_ids, -1)
    return SendOrder(rows, row_of_slot, ids, plan.num_experts // nodes, joins_slots=True)


def plan_in_node(ids: torch.Tensor, probs: torch.Tensor, num_experts: int) -> RoutingPlan:
    """Return the routing of a node's tokens over its experts; no expert has id ``num_experts``."""
    order = moe_sort(ids, num_experts)
    return RoutingPlan(ids, probs, *order, order[1] < order[3][-1], num_experts)


def slots_in_order(plan: RoutingPlan) -> torch.Tensor:
    """Return the row of each slot in a node by rank of origin, token and choice.

    That is the order in which the origin expects results; slots without an expert are last.
    """
    dropped = (plan.positions >= plan.offsets[-1]).to(torch.int32)
    return plan.positions.flatten().index_select(0, moe_sort(dropped, 1)[0])


def _nodes_of_slots(plan: RoutingPlan, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the node of each slot, ``nodes`` for a dropped one, and which are not dropped."""
    kept = plan.positions < plan.offsets[-1]
    # A graph may come here before its operator has checked the ids: no sort raises on them.
    ids = plan.expert_ids.clamp(0, plan.num_experts)
    node = torch.where(kept, ids // (plan.num_experts // nodes), nodes)
    return node, kept
