"""The token dispatcher: tokens to the ranks of their experts, and the experts' results back.

``TokenDispatcher`` has the steps of dispatch and combine, over one group or, hierarchically, over
two. A step is one exchange over one group, a *hop*. A hop is an operator, which starts and waits at
once (``operators.py``), also in compiled graphs. With chunks, and in micro-batch overlap, it starts
and waits in separate steps: the experts compute one chunk while later chunks arrive and earlier
results travel back. Both run the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.expert.all_to_all import DispatchAllToAll
from fusedops.parallel.expert.arguments import DispatchOptions
from fusedops.parallel.expert.hierarchical import origin_plan, plan_in_node, slots_in_order
from fusedops.parallel.expert.operators import (
    COMBINE,
    DISPATCH,
    CombineArguments,
    DispatchArguments,
    DispatchResults,
    combine_exchange,
    dispatch_results,
)
from fusedops.parallel.expert.start import StartedChunk, start_dispatch, wants_gradient


class Hop:
    """An exchange of rows over one group, ``options.groups[level]``, and of results in reverse.

    Args:
        options: of the dispatch.
        level: the index of the group.
        input: ``[T, H]``; only its dtype and device matter.
        plan: the routing of the rows that are sent.
        results: waits for what arrives.
        in_steps: whether starting and waiting are separate steps.
    """

    def __init__(
        self,
        options: DispatchOptions,
        level: int,
        input: torch.Tensor,
        plan: RoutingPlan,
        results: Callable[[], DispatchResults],
        *,
        in_steps: bool,
    ) -> None:
        self.options, self.level, self.plan, self.in_steps = options, level, plan, in_steps
        self.group = options.groups[level]
        # Experts for which a rank of the group receives rows.
        self.num_experts = plan.num_experts // self.group.size()
        self._like = input.detach()[:0]
        self._wait = results
        self._results: DispatchResults | None = None

    def results(self) -> DispatchResults:
        """Return what arrives."""
        if self._results is None:
            self._results = self._wait()
        return self._results

    def next(self) -> Hop:
        """Wait, and start the hop within the node."""
        rows, probs, ids, _, dropped, anchor = self.results()
        plan = plan_in_node(ids, probs, self.num_experts)
        start = _in_steps if self.in_steps else _by_operator
        (hop,) = start(self.options, 1, rows, plan, dropped.sum(), anchor)
        return hop

    def combine_start(self, output: torch.Tensor, order: torch.Tensor | None = None) -> Pending:
        """Start the exchange of results: one per row, or in an order one per slot.

        They return in the order in which the rows were dispatched.
        """
        results, options = self.results(), self.options
        arguments = CombineArguments(
            output=output,
            anchor=results.anchor,
            counts=results.counts,
            like=self._like,
            order=order,
            num_slots=self.plan.permutation.shape[0],
            max_rows=options.max_rows,
            validate=options.validate,
            groups=[group.group_name for group in options.groups],
            level=self.level,
        )
        if not self.in_steps and isinstance(output, torch.Tensor):
            rows = COMBINE(*arguments)
            return Pending(lambda: rows)
        exchange, output = combine_exchange(arguments)
        ticket = begin(exchange, output, anchor=results.anchor)
        return Pending(lambda: end(exchange, ticket)[0])


class TokenDispatcher:
    """Dispatch and combine of one chunk of tokens, from its first hop on."""

    def __init__(self, first: Hop) -> None:
        self.hops = [first]
        self.is_traced = torch.compiler.is_compiling()
        self._options = first.options

    def second_hop(self) -> None:
        """Wait for the tokens of this node, and send them to the ranks of their experts.

        Does nothing over a single group, or if it was called before.
        """
        if len(self.hops) < len(self._options.groups):
            self.hops.append(self.hops[0].next())

    def wait_tokens(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Return the rows for the experts of this rank, and their routing over these."""
        self.second_hop()
        last = self.hops[-1]
        rows, probs, ids = last.results()[:3]
        # Padding has no expert; without padding each row has one.
        has_expert = None if self._options.max_rows is None else ids < last.num_experts
        order = moe_sort(ids, last.num_experts)
        return rows, RoutingPlan(ids, probs, *order, has_expert, last.num_experts)

    def combine_start(self, output: torch.Tensor) -> PendingCombine:
        """Start to send the experts' results back."""
        return PendingCombine(self.hops, output)


class PendingCombine:
    """Results sent to the ranks of their tokens. The constructor starts the exchange.

    ``hops`` dispatched the rows, and ``output`` ``[R, H]`` has the result of each row.
    """

    def __init__(self, hops: Sequence[Hop], output: torch.Tensor) -> None:
        self._hops = hops
        self._in_node = hops[0].options.reduce == "node"
        self._num_waiting = len(hops)
        self._pending = hops[-1].combine_start(output)

    def second_hop(self, *, weighted: bool) -> None:
        """Wait for the results of this node, and send them to the ranks of their tokens."""
        if self._num_waiting < 2:
            return
        self._num_waiting = 1
        first, second = self._hops
        rows = self._pending.wait()
        if self._in_node:
            rows = moe_unpermute(rows, second.plan, weighted=weighted)
            self._pending = first.combine_start(rows)
        else:
            self._pending = first.combine_start(rows, slots_in_order(second.plan))

    def wait(self, *, weighted: bool) -> torch.Tensor:
        """Return ``[T, H]``, the sum of each token's slots."""
        self.second_hop(weighted=weighted)
        # Sums of a node are weighted already.
        weighted = weighted and not self._in_node
        first = self._hops[0]
        plan = origin_plan(first.options, first.level, first.plan)
        return moe_unpermute(self._pending.wait(), plan, weighted=weighted)


def dispatch_by_operators(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan
) -> TokenDispatcher:
    """Return a dispatcher whose hops are operators, of all tokens in one chunk."""
    return TokenDispatcher(*_by_operator(options, 0, input, plan))


def dispatch_in_steps(
    options: DispatchOptions, input: torch.Tensor, plan: RoutingPlan
) -> list[TokenDispatcher]:
    """Check the arguments on all ranks and start to send each chunk of the tokens."""
    return [TokenDispatcher(hop) for hop in _in_steps(options, 0, input, plan)]


def _by_operator(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    dropped: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
) -> list[Hop]:
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
        grads=wants_gradient(input, plan.probs),
        max_rows=options.max_rows,
        validate=options.validate,
        op=options.op,
        groups=[group.group_name for group in options.groups],
        level=level,
    )
    results = DispatchResults(*DISPATCH(*arguments))
    return [Hop(options, level, input, plan, lambda: results, in_steps=False)]


def _in_steps(
    options: DispatchOptions,
    level: int,
    input: torch.Tensor,
    plan: RoutingPlan,
    dropped: torch.Tensor | None = None,
    anchor: torch.Tensor | None = None,
) -> list[Hop]:
    def send(exchange: DispatchAllToAll, input: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return begin(exchange, input, probs, anchor=anchor)

    grads = wants_gradient(input, plan.probs)
    dropped = None if dropped is None else dropped.to(input.device)
    chunks = start_dispatch(options, level, input, plan, send, grads=grads, dropped=dropped)

    def results(chunk: StartedChunk) -> DispatchResults:
        *arrived, anchor = end(chunk.exchange, chunk.ticket)
        return dispatch_results(chunk.exchange, arrived, anchor)

    return [
        Hop(options, level, input, chunk.plan, partial(results, chunk), in_steps=True)
        for chunk in chunks
    ]
