"""The token dispatcher: tokens to the ranks of their experts, and the experts' results back.

``TokenDispatcher`` has the steps of dispatch and combine, over one group or, hierarchically, over
two. A step is one exchange over one group, a *hop*. A hop is an operator, which starts and waits at
once (``operators.py``), also in compiled graphs. With chunks, and in micro-batch overlap, it starts
and waits in separate steps: the experts compute one chunk while later chunks arrive and earlier
results travel back. Both run the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.collective_errors import vote
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.expert.all_to_all import CombineAllToAll, DispatchResults, start_dispatch
from fusedops.parallel.expert.arguments import DispatchOptions
from fusedops.parallel.expert.hierarchical import origin_plan, plan_in_node, slots_in_order
from fusedops.parallel.expert.operators import COMBINE, DISPATCH, DispatchArguments


@dataclass(eq=False)
class Hop:
    """An exchange of rows over one group, ``options.groups[level]``, and of results in reverse."""

    options: DispatchOptions
    level: int
    plan: RoutingPlan  # the routing of the rows that are sent
    wait: Callable[[], DispatchResults]  # for what arrives
    in_steps: bool  # whether starting and waiting are separate steps
    _results: DispatchResults | None = None

    def __post_init__(self) -> None:
        self.group = self.options.groups[self.level]
        # Experts for which a rank of the group receives rows.
        self.num_experts = self.plan.num_experts // self.group.size()

    def results(self) -> DispatchResults:
        """Return what arrives."""
        if self._results is None:
            self._results = self.wait()
        return self._results

    def next(self) -> Hop:
        """Wait, and start the hop within the node."""
        rows, probs, ids, _, dropped, anchor = self.results()
        plan = plan_in_node(ids, probs, self.num_experts)
        (hop,) = _start(self.options, 1, rows, plan, dropped.sum(), anchor, in_steps=self.in_steps)
        return hop

    def combine_start(self, output: torch.Tensor, order: torch.Tensor | None = None) -> Pending:
        """Start the exchange of results: one per row, or in an order one per slot.

        They return in the order in which the rows were dispatched.
        """
        anchor, counts = self.results().anchor, self.results().counts
        num_slots = self.plan.permutation.shape[0]
        if not self.in_steps:
            name, label = self.group.group_name, CombineAllToAll.label
            rows = COMBINE(output, anchor, counts, order, num_slots, False, name, label)
            return Pending(lambda: rows)
        exchange = CombineAllToAll(counts, self.group, num_slots, output.shape[0], order)
        ticket = begin(exchange, output, anchor=anchor)
        return Pending(lambda: end(exchange, ticket)[0])


class TokenDispatcher:
    """Dispatch and combine of one chunk of tokens, from its first hop on."""

    def __init__(self, first: Hop) -> None:
        self.hops = [first]
        self.is_traced = torch.compiler.is_compiling()
        self._num_hops = len(first.options.groups)

    def second_hop(self) -> None:
        """Wait for the tokens of this node, and send them to the ranks of their experts.

        Does nothing over a single group, or if it was called before.
        """
        if len(self.hops) < self._num_hops:
            self.hops.append(self.hops[0].next())

    def wait_tokens(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Return the rows for the experts of this rank, and their routing over these."""
        self.second_hop()
        rows, probs, ids = self.hops[-1].results()[:3]
        num_experts = self.hops[-1].num_experts
        return rows, RoutingPlan(ids, probs, *moe_sort(ids, num_experts), None, num_experts)

    def combine_start(self, output: torch.Tensor, *, weighted: bool) -> PendingCombine:
        """Check the experts' output and start to send it back.

        With ``weighted`` the results are multiplied by their probabilities where they are summed.
        """
        rows = self.hops[-1].results().rows
        try:
            checks.like("moe_combine", "output", output, "the rows", rows, dtype=True)
            # A graph does not know how many rows arrive.
            num_rows = (output if torch.compiler.is_compiling() else rows).shape[:1]
            shape = (*num_rows, rows.shape[1])
            checks.shape("moe_combine", "output", output, shape, "that of the rows")
        except (TypeError, ValueError) as error:
            self._vote(error, rows.device)
            raise
        self._vote(None, rows.device)
        return PendingCombine(self.hops, output, weighted)

    def _vote(self, error: Exception | None, device: torch.device) -> None:
        """With ``validate`` raise on every rank if one has an error."""
        options = self.hops[0].options
        if options.validate and not torch.compiler.is_compiling():
            vote("moe_combine", options.groups[::-1], error, device=device)


class PendingCombine:
    """Results sent to the ranks of their tokens. The constructor starts the exchange."""

    def __init__(self, hops: Sequence[Hop], output: torch.Tensor, weighted: bool) -> None:
        self._hops, self._weighted = hops, weighted
        self._in_node = hops[0].options.reduce == "node"
        self._num_waiting = len(hops)
        self._pending = hops[-1].combine_start(output)

    def second_hop(self) -> None:
        """Wait for the results of this node, and send them to the ranks of their tokens."""
        if self._num_waiting < 2:
            return
        self._num_waiting = 1
        first, second = self._hops
        rows, order = self._pending.wait(), None
        if self._in_node:
            rows = moe_unpermute(rows, second.plan, weighted=self._weighted)
        else:
            order = slots_in_order(second.plan)
        self._pending = first.combine_start(rows, order)

    def wait(self) -> torch.Tensor:
        """Return ``[T, H]``, the sum of each token's slots."""
        self.second_hop()
        # Sums of a node are weighted already.
        weighted = self._weighted and not self._in_node
        first = self._hops[0]
        plan = origin_plan(first.options, first.level, first.plan)
        return moe_unpermute(self._pending.wait(), plan, weighted=weighted)


def start_tokens(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan, *, in_steps: bool
) -> list[TokenDispatcher]:
    """Check the arguments on all ranks and start to send the tokens; in steps, each chunk."""
    return [TokenDispatcher(hop) for hop in _start(options, 0, input, plan, in_steps=in_steps)]


def _start(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    dropped: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
    *,
    in_steps: bool,
) -> list[Hop]:
    """Start a hop; ``dropped`` and ``anchor`` are those of the hop before."""
    grads = torch.is_grad_enabled() and (input.requires_grad or plan.probs.requires_grad)
    if in_steps:
        chunks = start_dispatch(
            options, level, input, plan, grads=grads, dropped=dropped, anchor=anchor
        )
        return [Hop(options, level, part, wait, in_steps=True) for part, wait in chunks]
    arguments = DispatchArguments(
        input=input,
        probs=plan.probs,
        expert_ids=plan.expert_ids,
        permutation=plan.permutation,
        positions=plan.positions,
        offsets=plan.offsets,
        dropped=dropped,
        num_experts=plan.num_experts,
        reduce=options.reduce,
        payload=options.payload,
        grads=grads,
        validate=options.validate and not torch.compiler.is_compiling(),
        op=options.op,
        groups=[group.group_name for group in options.groups],
        level=level,
    )
    results = DispatchResults(*DISPATCH(*arguments))
    return [Hop(options, level, plan, lambda: results, in_steps=False)]
