"""Tokens straight to the ranks of their experts, and the results straight back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks
from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.parallel.async_exchange import begin, end
from fusedops.parallel.comm.host_groups import hosts_of
from fusedops.parallel.expert.all_to_all import Bound, FromExperts, Route, ToExperts
from fusedops.parallel.expert.metadata import Agreement, Beliefs, Rows, Verdict


@dataclass(frozen=True)
class Departure:
    """One chunk of tokens that is about to leave: the plan, and which packed rows follow from it.

    Attributes:
        input: ``[T, H]``.
        plan: the routing of its tokens.
        route: the rows that are sent, in the order of their destinations.
        slots: the same slots sorted by destination, where a row may carry several of them.
    """

    input: torch.Tensor
    plan: RoutingPlan
    route: Route
    slots: RoutingPlan | None = None


@dataclass(frozen=True, eq=False)
class Travel:
    """One chunk on its way over one group."""

    departure: Departure
    to: ToExperts
    ticket: torch.Tensor
    agreement: Agreement
    chunk: int
    group: dist.ProcessGroup
    row_bytes: int

    @property
    def rows(self) -> Rows:
        """How many rows go where."""
        return self.to.rows

    @property
    def slots(self) -> Rows:
        """How many slots they carry, where a row may carry several."""
        return self.agreement.wait()[1][self.chunk]

    @property
    def experts(self) -> int:
        """How many experts each rank of the group stands for."""
        return self.departure.plan.num_experts // self.group.size()

    @property
    def ids(self) -> torch.Tensor:
        """The ids that arrived, from 0 for the first expert here; ``experts`` where nobody's."""
        first = self.group.rank() * self.experts
        return torch.where(self.to.ids >= 0, self.to.ids - first, self.experts)

    @property
    def empty(self) -> torch.Tensor:
        """No rows, of the dtype, device and width of the tokens."""
        return self.departure.input.detach()[:0]


def depart(
    op: str,
    departures: Sequence[Departure],
    group: dist.ProcessGroup,
    *,
    quantized: bool,
    reduce: str,
    grads: bool,
    num_experts: int,
    dropped: torch.Tensor,
    faults: torch.Tensor,
    anchor: torch.Tensor | None = None,
    max_rows: int | None = None,
    across: dist.ProcessGroup | None = None,
) -> list[Travel]:
    """Agree once, then pack and send each chunk; all are on their way when this returns.

    ``across`` is the group of other nodes, where theirs would wait for the rows from here.
    """
    first = departures[0]
    layout = first.route.layout(first.input, quantized=quantized)
    agreement = Agreement(
        op,
        group,
        first.input.device,
        beliefs=Beliefs(
            num_experts,
            first.input.shape[1],
            first.input.dtype,
            layout.stride,
            grads,
            len(departures),
            reduce,
            -1 if max_rows is None else max_rows,
        ),
        rows=[rows_per_destination(each.route.order, group.size()) for each in departures],
        slots=[each.slots.tokens_per_expert for each in departures if each.slots is not None],
        dropped=dropped,
        faults=faults,
    )
    asked = [group] if across is None else [group, across]
    travels = []
    for chunk, each in enumerate(departures):
        counted = partial(_rows_of_chunk, agreement, chunk)
        bound = None if max_rows is None else Bound(op, max_rows, asked)
        to = ToExperts(each.route, layout, counted, group, bound)
        ticket = begin(to, each.input, each.plan.probs, anchor=anchor)
        travels.append(Travel(each, to, ticket, agreement, chunk, group, layout.stride))
    return travels


def _rows_of_chunk(agreement: Agreement, chunk: int) -> Rows:
    return agreement.wait()[0][chunk]


def wants_gradient(input: torch.Tensor, probs: torch.Tensor) -> bool:
    """Whether gradients of what is sent will be asked for."""
    return torch.is_grad_enabled() and (input.requires_grad or probs.requires_grad)


class Flat:
    """One chunk of tokens, from a group of ranks to their experts and back.

    Args:
        travel: the chunk on its way.
        across: the group of other nodes, where theirs wait for the results.
    """

    def __init__(self, travel: Travel, across: dist.ProcessGroup | None = None) -> None:
        self.travel, self._across = travel, across
        self._anchor: Any = None

    @property
    def num_dropped(self) -> tuple[int, int]:
        """Dropped slots of this rank and of the group."""
        dropped = self.travel.agreement.dropped
        return dropped[self.travel.group.rank()], sum(dropped)

    @property
    def num_rows(self) -> int:
        """Rows for the experts here."""
        return sum(self.travel.rows.receive)

    def relay(self) -> None:
        """Do nothing: the tokens go straight."""

    def arrive(self) -> tuple[torch.Tensor, RoutingPlan]:
        """Wait for the rows; returns them and their routing over the experts here."""
        travel = self.travel
        rows, probs, self._anchor = end(travel.to, travel.ticket)
        ids, experts = travel.ids, travel.experts
        return rows, RoutingPlan(ids, probs, *moe_sort(ids, experts), None, experts)

    def send_back(self, output: Any) -> FlatReturn:
        """Begin to send the experts' results."""
        return FlatReturn(self.travel, output, self.num_rows, self._anchor, self._across)


class FlatReturn:
    """Results on their way home."""

    def __init__(
        self,
        travel: Travel,
        output: Any,
        num_rows: int,
        anchor: torch.Tensor,
        across: dist.ProcessGroup | None,
    ) -> None:
        self._plan = travel.departure.plan
        groups = [travel.group] if across is None else [travel.group, across]
        output, self._verdict = promised(output, num_rows, travel.empty, groups)
        self._back = FromExperts(travel.rows, self._plan.permutation.numel(), travel.group)
        self._ticket = begin(self._back, output, anchor=anchor)

    def relay(self, *, weighted: bool) -> None:
        """Do nothing: the results come straight."""

    def arrive(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the results in the order in which the rows left; also returns the anchor.

        Raises on every rank when one could not send what it promised.
        """
        if self._verdict is not None:
            self._verdict.relay()  # while rows travel
        rows, anchor = end(self._back, self._ticket)
        if self._verdict is not None:
            self._verdict.wait()
        return rows, anchor

    def come_home(self, *, weighted: bool) -> torch.Tensor:
        """Wait, and sum the slots of each token."""
        rows, _ = self.arrive()
        return moe_unpermute(rows, self._plan, weighted=weighted)


def promised(
    output: Any, num_rows: int, empty: torch.Tensor, groups: Sequence[dist.ProcessGroup]
) -> tuple[torch.Tensor, Verdict | None]:
    """Look at the experts' result, and begin to tell the groups what is wrong with it.

    Returns the result, or zeros in its place: what others wait for. Raises here alone where hosts
    have no way to talk but over the device, whose work they would wait for.
    """
    shape = num_rows, empty.shape[1]
    problem: Exception | None = None
    try:
        checks.like("moe_combine", "output", output, "the rows", empty, dtype=True)
        checks.shape("moe_combine", "output", output, shape, "that of the rows")
    except (TypeError, ValueError) as error:
        problem, output = error, empty.new_zeros(shape)
    hosts = hosts_of(groups)
    if hosts is not None:
        return output, Verdict("moe_combine", hosts, problem)
    if problem is not None:
        raise problem
    return output, None


def rows_per_destination(order: RoutingPlan, size: int) -> torch.Tensor:
    """Return how many rows of a plan go to each of ``size`` ranks, int32."""
    per_rank = order.num_experts // size
    ends = order.offsets[per_rank - 1 :: per_rank]
    return torch.diff(ends, prepend=ends.new_zeros(1))
