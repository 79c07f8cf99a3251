"""Dispatch and combine as operators, for eager code and for ``torch.compile``.

Code that depends on the host (metadata, error status, row counts, the collectives) runs inside. The
number of rows that arrive is a symbol. Counts pass from dispatch to combine as int64 tensors on the
CPU. An anchor, a float32 scalar, connects the two in the autograd graph, so that a rank without
rows takes part in every exchange.

An operator is one exchange over one group. The arguments of dispatch name all groups, one or those
across and within nodes, and the index of its own (``level``), because an error must reach the ranks
of all. Combine is its own gradient: it sends rows in one direction or in the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._core import checks
from fusedops._core.library import define_exchange
from fusedops.ops import RoutingPlan, moe_pack
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.comm.collectives import group_of
from fusedops.parallel.expert.all_to_all import (
    GRADIENTS_OF_TOKENS,
    CombineAllToAll,
    DispatchResults,
    start_dispatch,
    token_gradients,
)
from fusedops.parallel.expert.arguments import DispatchOptions
from fusedops.parallel.expert.hierarchical import send_order


class DispatchArguments(NamedTuple):
    """The arguments of ``moe_dispatch_rows``; its results are ``DispatchResults``."""

    input: Tensor  # ``[T, H]``
    probs: Tensor  # ``[T, k]``; with the four behind it the routing of the rows
    expert_ids: Tensor  # ``[T, k]``
    permutation: Tensor  # ``[T * k]``
    positions: Tensor  # ``[T, k]``
    offsets: Tensor  # ``[num_experts]``
    # Int64 scalar on the CPU, slots dropped on the ranks that the first level joined;
    # ``None`` at the first level
    dropped: Tensor | None
    num_experts: int  # of the group's ranks together
    reduce: str  # where a token's slots are summed
    payload: str | None  # ``"float8"`` or ``None``
    grads: bool  # whether autograd will ask for gradients
    validate: bool  # of the dispatch; all ranks must agree on it
    op: str  # the name of the public function, for messages
    groups: list[str]  # names of all groups of the dispatch
    level: int  # the index of this exchange's group among them

    @property
    def plan(self) -> RoutingPlan:
        """The routing; without ``tokens_per_expert``, which no exchange reads."""
        order = self.permutation, self.positions, self.offsets.new_empty(0), self.offsets
        return RoutingPlan(self.expert_ids, self.probs, *order, None, self.num_experts)

    @property
    def options(self) -> DispatchOptions:
        """The arguments of the public function."""
        groups = list(map(group_of, self.groups))
        return DispatchOptions(self.op, groups, self.reduce, self.payload, validate=self.validate)


def _dispatch(*args: Any) -> DispatchResults:
    a = DispatchArguments(*args)
    ((_, wait),) = start_dispatch(
        a.options, a.level, a.input, a.plan, grads=a.grads, dropped=a.dropped
    )
    return wait()


def _dispatch_fake(*args: Any) -> DispatchResults:
    a = DispatchArguments(*args)
    size, hidden = group_of(a.groups[a.level]).size(), a.input.shape[1]
    to_nodes = a.level < len(a.groups) - 1
    pairs = int(a.positions.shape[1]) if to_nodes else 1
    # Slots are int32, and fewer than 2**31 as moe_sort demands.
    num_rows: Any = torch.library.get_ctx().new_dynamic_size(min=0, max=(2**31 - 1) // pairs)
    layout = PayloadLayout(hidden, a.input.dtype, a.probs.dtype, pairs, a.payload is not None)
    stride = hidden if layout.quantized else layout.stride // a.input.dtype.itemsize
    return DispatchResults(
        a.input.new_empty_strided((num_rows, hidden), (stride, 1)),
        a.probs.new_empty((num_rows, pairs)),
        a.input.new_empty((num_rows, pairs), dtype=torch.int32),
        torch.empty((4, size), dtype=torch.int64, device="cpu"),
        torch.empty(size, dtype=torch.int64, device="cpu"),
        a.input.new_empty((), dtype=torch.float32),
    )


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, *routing = inputs[:6]
    ctx.save_for_backward(*routing, DispatchResults(*output).counts)
    ctx.inputs = inputs[6:]


def _dispatch_gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise checks.UnsupportedError("moe_dispatch: has no second derivative")
    *routing, counts = ctx.saved_tensors
    gradients = DispatchResults(*grads)
    a = DispatchArguments(gradients.rows, *routing, *ctx.inputs)
    order = send_order(a.options, a.level, a.plan)
    packed = moe_pack(gradients.rows, gradients.probs.to(a.probs.dtype))
    num_slots, group = order.plan.permutation.shape[0], a.groups[a.level]
    # The anchor orders this exchange after those of the gradients of results.
    payload = COMBINE(
        packed, gradients.anchor, counts, None, num_slots, False, group, GRADIENTS_OF_TOKENS
    )
    return *token_gradients(payload, order, gradients.rows), *[None] * (len(a) - 2)


def _combine(
    rows: Tensor,
    anchor: Tensor | None,
    counts: Tensor,
    order: Tensor | None,
    num_rows: int,
    reverse: bool,
    group: str,
    label: str,
) -> Tensor:
    """Send results back, or in ``reverse`` the gradients of what returned.

    ``counts`` and ``anchor`` are those of the dispatch, ``num_rows`` the rows of the result.
    """
    exchange = CombineAllToAll(counts, group_of(group), num_rows, num_rows, order, label)
    if reverse:
        exchange.start_backward(rows)
        return exchange.finish_backward()[0]
    exchange.start(rows)
    return exchange.finish()[0]


def _combine_fake(rows: Tensor, *args: Any) -> Tensor:
    return rows.new_empty((args[3], rows.shape[1]))


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, anchor, counts, order, _, reverse, *names = inputs
    ctx.save_for_backward(counts, order)
    ctx.constants = rows.shape[0], not reverse, *names
    ctx.has_anchor = anchor is not None


def _combine_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows = COMBINE(grad, None, *ctx.saved_tensors, *ctx.constants)
    anchor = grad.new_zeros((), dtype=torch.float32) if ctx.has_anchor else None
    return rows, anchor, *[None] * 6


DISPATCH = define_exchange(
    "moe_dispatch_rows",
    "(Tensor input, Tensor probs, Tensor expert_ids, Tensor permutation, Tensor positions,"
    " Tensor offsets, Tensor? dropped, SymInt num_experts, str reduce, str? payload, bool grads,"
    " bool validate, str op, str[] groups, int level) -> (Tensor rows, Tensor probs_of_rows,"
    " Tensor ids, Tensor counts, Tensor dropped_by_rank, Tensor anchor)",
    kernel=_dispatch,
    fake=_dispatch_fake,
    setup_context=_save_dispatch,
    backward=_dispatch_gradients,
)
COMBINE = define_exchange(
    "moe_combine_rows",
    "(Tensor rows, Tensor? anchor, Tensor counts, Tensor? order, SymInt num_rows, bool reverse,"
    " str group, str label) -> Tensor",
    kernel=_combine,
    fake=_combine_fake,
    setup_context=_save_combine,
    backward=_combine_gradients,
)
