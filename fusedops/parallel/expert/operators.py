"""Dispatch and combine as operators, for eager code and for ``torch.compile``.

Code that depends on the host (metadata, error status, row counts, the collectives) runs inside. The
number of rows that arrive is a symbol, or ``max_rows``. Counts pass from dispatch to combine as
int64 tensors on the CPU. An anchor, a float32 scalar, connects the two in the autograd graph, so
that a rank without rows takes part in every exchange.

An operator is one exchange over one group. Its arguments name all groups of the dispatch, one or
those across and within nodes, and the index of its own (``level``), because an error must reach the
ranks of all. Arguments and results are the fields of a named tuple, from which the schema is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fusedops._core import checks
from fusedops._core.library import define_exchange
from fusedops.ops import RoutingPlan
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.async_exchange import RowCounts
from fusedops.parallel.collective_errors import vote
from fusedops.parallel.comm.collectives import group_of
from fusedops.parallel.expert.all_to_all import CombineAllToAll, DispatchAllToAll
from fusedops.parallel.expert.arguments import DispatchOptions
from fusedops.parallel.expert.hierarchical import send_order
from fusedops.parallel.expert.metadata import ExchangeCounts
from fusedops.parallel.expert.start import start_dispatch

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    str: "str",
    str | None: "str?",
    list[str]: "str[]",
}


class DispatchArguments(NamedTuple):
    """The arguments of ``moe_dispatch_rows``."""

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
    max_rows: int | None  # rows of the result, or ``None`` for those that arrive
    validate: bool  # of the dispatch; all ranks must agree on it
    op: str  # the name of the public function, for messages
    groups: list[str]  # names of all groups of the dispatch
    level: int  # the index of this exchange's group among them


class DispatchResults(NamedTuple):
    """The results of ``moe_dispatch_rows``."""

    rows: Tensor  # ``[R, H]``, those for this rank
    probs: Tensor  # ``[R, pairs]``; a row to a node carries all slots of its token there
    # ``[R, pairs]`` int32, from 0 for the first expert of the rank (at level 0 of two: of the
    # node); their number stands for no expert
    ids: Tensor
    # Int64 ``[4, ranks]`` on the CPU: rows for and from each rank, slots for and from each,
    # where a row carries several
    counts: Tensor
    dropped: Tensor  # int64 ``[ranks]`` on the CPU, slots dropped on each
    anchor: Tensor  # of the autograd graph


class DispatchBackwardArguments(NamedTuple):
    """Of ``moe_dispatch_rows_backward``: gradients of the results, and saved tensors."""

    grad_rows: Tensor
    grad_probs: Tensor
    grad_anchor: Tensor
    probs: Tensor
    expert_ids: Tensor
    permutation: Tensor
    positions: Tensor
    offsets: Tensor
    counts: Tensor
    num_experts: int
    groups: list[str]
    level: int


class DispatchGradients(NamedTuple):
    """The results of ``moe_dispatch_rows_backward``."""

    grad_input: Tensor
    grad_input_probs: Tensor


class CombineArguments(NamedTuple):
    """The arguments of ``moe_combine_rows``."""

    output: Tensor  # ``[R, H]``
    anchor: Tensor  # of the dispatch
    counts: Tensor  # of the dispatch
    like: Tensor  # ``[0, H]``, of the dtype and device of the rows
    # Int32, begins with the result of each slot; ``None``: a result for each row
    order: Tensor | None
    num_slots: int  # rows of the result
    max_rows: int | None  # rows of the experts' output; ``None``: one for each row that arrived
    validate: bool  # whether all ranks raise if the output of one does not fit
    groups: list[str]  # names of all groups of the dispatch
    level: int  # the index of this exchange's group among them


class CombineResults(NamedTuple):
    """The result of ``moe_combine_rows``, in the order in which the rows were dispatched."""

    rows: Tensor


class CombineBackwardArguments(NamedTuple):
    """Of ``moe_combine_rows_backward``: the gradient of the result, and saved tensors."""

    grad: Tensor
    counts: Tensor
    order: Tensor | None
    num_rows: int
    group: str


class CombineGradients(NamedTuple):
    """The results of ``moe_combine_rows_backward``."""

    grad_output: Tensor
    grad_anchor: Tensor


def _plan(a: DispatchArguments | DispatchBackwardArguments) -> RoutingPlan:
    """Return the routing; without ``tokens_per_expert``, which no exchange reads."""
    order = a.permutation, a.positions, a.offsets.new_empty(0), a.offsets
    return RoutingPlan(a.expert_ids, a.probs, *order, None, a.num_experts)


def _dispatch(a: DispatchArguments) -> DispatchResults:
    groups = [group_of(name) for name in a.groups]
    options = DispatchOptions(a.op, groups, a.reduce, a.payload, a.max_rows, validate=a.validate)
    dropped = None if a.dropped is None else a.dropped.to(a.input.device)
    ((_, exchange, _),) = start_dispatch(
        options, a.level, a.input, _plan(a), DispatchAllToAll.start, grads=a.grads, dropped=dropped
    )
    anchor = a.input.new_zeros((), dtype=torch.float32)
    return dispatch_results(exchange, exchange.finish(), anchor)


def dispatch_results(
    exchange: DispatchAllToAll, arrived: Sequence[Tensor], anchor: Tensor
) -> DispatchResults:
    """Return the results of an exchange that has finished."""
    rows, probs = arrived
    row_counts, slot_counts, dropped = exchange.get_counts()
    counts = torch.tensor([*row_counts, *slot_counts])
    return DispatchResults(rows, probs, exchange.ids, counts, torch.tensor(dropped), anchor)


def _dispatch_fake(a: DispatchArguments) -> DispatchResults:
    size, hidden = group_of(a.groups[a.level]).size(), a.input.shape[1]
    to_nodes = a.level < len(a.groups) - 1
    pairs = int(a.positions.shape[1]) if to_nodes else 1
    num_rows: Any = a.max_rows
    if num_rows is None:
        # Slots are int32, and fewer than 2**31 as moe_sort demands.
        num_rows = torch.library.get_ctx().new_dynamic_size(min=0, max=(2**31 - 1) // pairs)
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


def _save_dispatch(ctx: Any, a: DispatchArguments, results: DispatchResults) -> None:
    order = a.permutation, a.positions, a.offsets
    ctx.save_for_backward(a.probs, a.expert_ids, *order, results.counts)
    ctx.constants = a.num_experts, a.groups, a.level


def _dispatch_gradients(ctx: Any, grads: DispatchResults) -> dict[str, Tensor]:
    tensors = grads.rows, grads.probs, grads.anchor, *ctx.saved_tensors
    grad_input, grad_probs = _DISPATCH_BACKWARD(*tensors, *ctx.constants)
    return {"input": grad_input, "probs": grad_probs}


def _dispatch_backward(a: DispatchBackwardArguments) -> DispatchGradients:
    options = DispatchOptions("moe_dispatch", [group_of(name) for name in a.groups])
    order = send_order(options, a.level, _plan(a))
    counts = RowCounts(*a.counts[:2].tolist())
    exchange = DispatchAllToAll(
        options,
        a.level,
        order,
        order.layout(a.grad_rows),
        lambda: ExchangeCounts(counts, counts, []),
    )
    exchange.start_backward(a.grad_rows, a.grad_probs)
    return DispatchGradients(*exchange.finish_backward())


def _dispatch_backward_fake(a: DispatchBackwardArguments) -> DispatchGradients:
    grad_input = a.grad_rows.new_empty((a.positions.shape[0], a.grad_rows.shape[1]))
    return DispatchGradients(grad_input, a.probs.new_empty(a.positions.shape))


def _counts(a: CombineArguments | CombineBackwardArguments) -> RowCounts:
    return RowCounts(*(a.counts[:2] if a.order is None else a.counts[2:]).tolist())


def combine_exchange(a: CombineArguments) -> tuple[CombineAllToAll, Tensor]:
    """Return the exchange of results, and the checked results."""
    counts, output = _counts(a), a.output
    groups = [group_of(name) for name in a.groups]
    if a.level == len(groups) - 1:  # from the experts; the other level only passes results on
        num_rows = sum(counts.receive) if a.max_rows is None else a.max_rows
        error: Exception | None = None
        try:
            checks.like("moe_combine", "output", output, "the rows", a.like, dtype=True)
            shape = num_rows, a.like.shape[1]
            checks.shape("moe_combine", "output", output, shape, "that of the rows")
        except (TypeError, ValueError) as problem:
            if not a.validate:
                raise
            error = problem
        if a.validate:
            vote("moe_combine", groups[::-1], error, device=a.like.device)
    exchange = CombineAllToAll(counts, a.num_slots, groups[a.level], output.shape[0], a.order)
    return exchange, output


def _combine(a: CombineArguments) -> CombineResults:
    exchange, output = combine_exchange(a)
    exchange.start(output)
    return CombineResults(*exchange.finish())


def _combine_fake(a: CombineArguments) -> CombineResults:
    return CombineResults(a.like.new_empty((a.num_slots, a.like.shape[1])))


def _save_combine(ctx: Any, a: CombineArguments, results: CombineResults) -> None:
    ctx.save_for_backward(a.counts, a.order)
    ctx.constants = a.output.shape[0], a.groups[a.level]


def _combine_gradients(ctx: Any, grads: CombineResults) -> dict[str, Tensor]:
    grad_output, grad_anchor = _COMBINE_BACKWARD(grads.rows, *ctx.saved_tensors, *ctx.constants)
    return {"output": grad_output, "anchor": grad_anchor}


def _combine_backward(a: CombineBackwardArguments) -> CombineGradients:
    num_slots = a.grad.shape[0]
    exchange = CombineAllToAll(_counts(a), num_slots, group_of(a.group), a.num_rows, a.order)
    exchange.start_backward(a.grad)
    (grad_output,) = exchange.finish_backward()
    return CombineGradients(grad_output, a.grad.new_zeros((), dtype=torch.float32))


def _combine_backward_fake(a: CombineBackwardArguments) -> CombineGradients:
    grad_output = a.grad.new_empty((a.num_rows, a.grad.shape[1]))
    return CombineGradients(grad_output, a.grad.new_empty((), dtype=torch.float32))


def _define(
    name: str,
    kernel: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    save: Callable[[Any, Any, Any], None] | None = None,
    gradients: Callable[[Any, Any], dict[str, Tensor]] | None = None,
) -> Callable[..., Any]:
    """Register an operator whose kernel takes and returns named tuples, as its annotations say.

    ``gradients`` returns those of the arguments that have one, by name.
    """
    hints = get_type_hints(kernel)
    arguments, results = hints["a"], hints["return"]

    def plain(values: Any) -> Any:
        return values[0] if len(values) == 1 else tuple(values)

    def named(values: Any) -> Any:
        return results(values) if len(results._fields) == 1 else results(*values)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        assert save is not None
        save(ctx, arguments(*inputs), named(output))

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        assert gradients is not None
        by_name = gradients(ctx, results(*grads))
        return tuple(by_name.get(field) for field in arguments._fields)

    schema = [
        ", ".join(f"{_SCHEMA_TYPES[kind]} {field}" for field, kind in get_type_hints(side).items())
        for side in (arguments, results)
    ]
    return define_exchange(
        name,
        f"({schema[0]}) -> ({schema[1]})",
        kernel=lambda *values: plain(kernel(arguments(*values))),
        fake=lambda *values: plain(fake(arguments(*values))),
        setup_context=None if save is None else setup_context,
        backward=None if gradients is None else backward,
    )


DISPATCH = _define(
    "moe_dispatch_rows", _dispatch, _dispatch_fake, _save_dispatch, _dispatch_gradients
)
_DISPATCH_BACKWARD = _define(
    "moe_dispatch_rows_backward", _dispatch_backward, _dispatch_backward_fake
)
COMBINE = _define("moe_combine_rows", _combine, _combine_fake, _save_combine, _combine_gradients)
_COMBINE_BACKWARD = _define("moe_combine_rows_backward", _combine_backward, _combine_backward_fake)
