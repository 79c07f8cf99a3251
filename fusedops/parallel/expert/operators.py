"""The exchanges of expert parallelism as torch operators, for compiled graphs.

A compiler sees tensors in and tensors out; whatever needs the host (counts, agreement, collectives)
happens inside, by the code that runs eagerly. How many rows arrive is a symbol, or a bound that the
caller gave. Counts travel from dispatch to combine as int64 tensors on the CPU, and an anchor, a
float32 scalar, ties the two together in the graph of gradients: also a rank without rows takes part
in every exchange.

An operator is one exchange over one group. It is told all groups of the way, one or those across
and within nodes, and its level among them, because what is wrong must reach the ranks of all.
Arguments and results of each are named once, in a tuple that its schema is made from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core.library import define_exchange
from fusedops.ops import RoutingPlan
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel.async_exchange import end
from fusedops.parallel.expert.all_to_all import FromExperts, Route, ToExperts
from fusedops.parallel.expert.dispatcher import start
from fusedops.parallel.expert.flat import Travel, promised
from fusedops.parallel.expert.hierarchical import depart_within, route_to_nodes
from fusedops.parallel.expert.metadata import Rows

_WORDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    str: "str",
    str | None: "str?",
    list[str]: "str[]",
}


class Send(NamedTuple):
    """What ``moe_send`` takes: rows for the ranks of their experts, or for their nodes.

    Attributes:
        input: ``[T, H]``.
        probs: ``[T, k]``; with the four behind it the routing of the rows.
        expert_ids: ``[T, k]``.
        permutation: ``[T * k]``.
        positions: ``[T, k]``.
        offsets: ``[num_experts]``.
        dropped: int64 scalar on the CPU, slots dropped on the ranks that the level before this one
            joined; ``None`` at the first level.
        num_experts: of the group's ranks together.
        reduce: where a token's slots are summed.
        payload: how rows travel.
        grads: whether gradients will be asked for.
        max_rows: rows of the result, or ``None`` for those that arrive.
        op: the function's name, for messages.
        groups: names of the groups of the whole way.
        level: the place of this exchange's group among them.
    """

    input: Tensor
    probs: Tensor
    expert_ids: Tensor
    permutation: Tensor
    positions: Tensor
    offsets: Tensor
    dropped: Tensor | None
    num_experts: int
    reduce: str
    payload: str | None
    grads: bool
    max_rows: int | None
    op: str
    groups: list[str]
    level: int


class Arrived(NamedTuple):
    """What ``moe_send`` returns.

    Attributes:
        rows: ``[R, H]``, those for this rank.
        probs: ``[R, pairs]``; a row to a node carries all slots of its token there.
        ids: ``[R, pairs]`` int32, from 0 for the first expert here; the number of experts here
            where nobody's.
        counts: int64 ``[4, ranks]`` on the CPU: rows for and from each rank, slots for and from
            each, where a row may carry several.
        dropped: int64 ``[ranks]`` on the CPU, slots dropped on each.
        anchor: of the graph of gradients.
    """

    rows: Tensor
    probs: Tensor
    ids: Tensor
    counts: Tensor
    dropped: Tensor
    anchor: Tensor


class SendBackward(NamedTuple):
    """What ``moe_send_backward`` takes: gradients of rows and probabilities, and what was saved."""

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


class Sent(NamedTuple):
    """What ``moe_send_backward`` returns: the gradients at home."""

    grad_input: Tensor
    grad_probs_home: Tensor


class Return(NamedTuple):
    """What ``moe_return`` takes: results for where their rows came from.

    Attributes:
        output: ``[R, H]``.
        anchor: of the exchange that brought the rows.
        counts: of it.
        like: ``[0, H]``, of the dtype and device of the rows.
        order: int32, beginning with the result of each slot that came, where one is owed for each;
            ``None``: one for each row.
        room: rows of what returns.
        max_rows: how many results the experts owe; ``None``: one for each row that arrived.
        groups: names of the groups of the whole way.
        level: the place of this exchange's group among them.
    """

    output: Tensor
    anchor: Tensor
    counts: Tensor
    like: Tensor
    order: Tensor | None
    room: int
    max_rows: int | None
    groups: list[str]
    level: int


class Returned(NamedTuple):
    """What ``moe_return`` returns: results in the order in which their rows left, then garbage."""

    rows: Tensor


class ReturnBackward(NamedTuple):
    """What ``moe_return_backward`` takes: the gradient of what returned, and what was saved."""

    grad: Tensor
    counts: Tensor
    order: Tensor | None
    num_rows: int
    group: str


class ReturnedBackward(NamedTuple):
    """What ``moe_return_backward`` returns."""

    grad_output: Tensor
    grad_anchor: Tensor


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _plan(a: Send | SendBackward) -> RoutingPlan:
    """Return the routing; counts of the experts at home are not sent, so it has none."""
    order = a.permutation, a.positions, a.offsets.new_empty(0), a.offsets
    return RoutingPlan(a.expert_ids, a.probs, *order, None, a.num_experts)


def _depart(a: Send) -> Travel:
    groups = [_group(name) for name in a.groups]
    options: dict[str, Any] = {"reduce": a.reduce, "grads": a.grads, "max_rows": a.max_rows}
    if a.level == 0:
        (way,) = start(a.op, a.input, _plan(a), groups, payload=a.payload, **options)
        return way.travel
    assert a.dropped is not None
    options.update(quantized=a.payload == "float8", dropped=a.dropped.to(a.input.device))
    return depart_within(a.op, a.input, _plan(a), groups, **options)


def _send(a: Send) -> Arrived:
    travel = _depart(a)
    rows, probs, anchor = end(travel.to, travel.ticket)
    by_rank = travel.rows, travel.slots
    counts = torch.tensor([each for count in by_rank for each in (count.send, count.receive)])
    return Arrived(rows, probs, travel.ids, counts, torch.tensor(travel.agreement.dropped), anchor)


def _send_fake(a: Send) -> Arrived:
    size, hidden = _group(a.groups[a.level]).size(), a.input.shape[1]
    to_nodes = a.level < len(a.groups) - 1
    pairs = int(a.positions.shape[1]) if to_nodes else 1
    many: Any = a.max_rows
    if many is None:
        # Slots are int32, and fewer than 2**31 as moe_sort demands.
        many = torch.library.get_ctx().new_dynamic_size(min=0, max=(2**31 - 1) // pairs)
    layout = PayloadLayout(hidden, a.input.dtype, a.probs.dtype, pairs, a.payload is not None)
    stride = hidden if layout.quantized else layout.stride // a.input.dtype.itemsize
    return Arrived(
        a.input.new_empty_strided((many, hidden), (stride, 1)),
        a.probs.new_empty((many, pairs)),
        a.input.new_empty((many, pairs), dtype=torch.int32),
        torch.empty((4, size), dtype=torch.int64, device="cpu"),
        torch.empty(size, dtype=torch.int64, device="cpu"),
        a.input.new_empty((), dtype=torch.float32),
    )


def _save_sent(ctx: Any, a: Send, results: Arrived) -> None:
    order = a.permutation, a.positions, a.offsets
    ctx.save_for_backward(a.probs, a.expert_ids, *order, results.counts)
    ctx.constants = a.num_experts, a.groups, a.level


def _sent_backward(ctx: Any, grads: Arrived) -> dict[str, Tensor]:
    received = grads.rows, grads.probs, grads.anchor
    home = Sent(*_MOE_SEND_BACKWARD(*received, *ctx.saved_tensors, *ctx.constants))
    return {"input": home.grad_input, "probs": home.grad_probs_home}


def _send_backward(a: SendBackward) -> Sent:
    group, plan = _group(a.groups[a.level]), _plan(a)
    if a.level < len(a.groups) - 1:
        route = route_to_nodes(plan, group.size())
    else:
        route = Route(plan, a.positions, a.expert_ids)
    layout = PayloadLayout(
        a.grad_rows.shape[1], a.grad_rows.dtype, a.probs.dtype, a.grad_probs.shape[1]
    )
    counted = Rows(*a.counts[:2].tolist())
    exchange = ToExperts(route, layout, lambda: counted, group)
    exchange.start_backward(a.grad_rows, a.grad_probs)
    return Sent(*exchange.finish_backward())


def _send_backward_fake(a: SendBackward) -> Sent:
    grad_input = a.grad_rows.new_empty((a.positions.shape[0], a.grad_rows.shape[1]))
    return Sent(grad_input, a.probs.new_empty(a.positions.shape))


def _came(a: Return | ReturnBackward) -> Rows:
    return Rows(*(a.counts[:2] if a.order is None else a.counts[2:]).tolist())


def _return(a: Return) -> Returned:
    came, output, told = _came(a), a.output, None
    groups = [_group(name) for name in a.groups]
    if a.level == len(groups) - 1:  # from the experts; the other level only passes them on
        owed = sum(came.receive) if a.max_rows is None else a.max_rows
        output, told = promised(output, owed, a.like, groups[::-1])
    exchange = FromExperts(came, a.room, groups[a.level], order=a.order)
    exchange.start(output)
    if told is not None:
        told.relay()  # while rows travel
    (rows,) = exchange.finish()
    if told is not None:
        told.wait()
    return Returned(rows)


def _return_fake(a: Return) -> Returned:
    return Returned(a.like.new_empty((a.room, a.like.shape[1])))


def _save_returned(ctx: Any, a: Return, results: Returned) -> None:
    ctx.save_for_backward(a.counts, a.order)
    ctx.constants = a.output.shape[0], a.groups[a.level]


def _returned_backward(ctx: Any, grads: Returned) -> dict[str, Tensor]:
    results = _MOE_RETURN_BACKWARD(grads.rows, *ctx.saved_tensors, *ctx.constants)
    home = ReturnedBackward(*results)
    return {"output": home.grad_output, "anchor": home.grad_anchor}


def _return_backward(a: ReturnBackward) -> ReturnedBackward:
    room = a.grad.shape[0]
    exchange = FromExperts(_came(a), room, _group(a.group), a.num_rows, a.order)
    exchange.start_backward(a.grad)
    (grad_output,) = exchange.finish_backward()
    return ReturnedBackward(grad_output, a.grad.new_zeros((), dtype=torch.float32))


def _return_backward_fake(a: ReturnBackward) -> ReturnedBackward:
    grad_output = a.grad.new_empty((a.num_rows, a.grad.shape[1]))
    return ReturnedBackward(grad_output, a.grad.new_empty((), dtype=torch.float32))


def _exchange(
    name: str,
    takes: type[Any],
    returns: type[Any],
    kernel: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    save: Callable[[Any, Any, Any], None] | None = None,
    backward: Callable[[Any, Any], dict[str, Tensor]] | None = None,
) -> Callable[..., Any]:
    """Register an op whose functions take and return named tuples.

    ``backward`` returns the gradients of the arguments that have one, by name.
    """

    def plain(values: Any) -> Any:
        return values[0] if len(values) == 1 else tuple(values)

    def named(results: Any) -> Any:
        return returns(results) if len(returns._fields) == 1 else returns(*results)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        assert save is not None
        save(ctx, takes(*inputs), named(output))

    def gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        assert backward is not None
        by_name = backward(ctx, returns(*grads))
        return tuple(by_name.get(field) for field in takes._fields)

    schema = [
        ", ".join(f"{_WORDS[kind]} {field}" for field, kind in get_type_hints(side).items())
        for side in (takes, returns)
    ]
    return define_exchange(
        name,
        f"({schema[0]}) -> ({schema[1]})",
        kernel=lambda *values: plain(kernel(takes(*values))),
        fake=lambda *values: plain(fake(takes(*values))),
        setup_context=None if save is None else setup_context,
        backward=None if backward is None else gradients,
    )


_MOE_SEND = _exchange("moe_send", Send, Arrived, _send, _send_fake, _save_sent, _sent_backward)
_MOE_SEND_BACKWARD = _exchange(
    "moe_send_backward", SendBackward, Sent, _send_backward, _send_backward_fake
)
_MOE_RETURN = _exchange(
    "moe_return", Return, Returned, _return, _return_fake, _save_returned, _returned_backward
)
_MOE_RETURN_BACKWARD = _exchange(
    "moe_return_backward",
    ReturnBackward,
    ReturnedBackward,
    _return_backward,
    _return_backward_fake,
)


def moe_send(arguments: Send) -> Arrived:
    """Send rows and return those for this rank."""
    return Arrived(*_MOE_SEND(*arguments))


def moe_return(arguments: Return) -> torch.Tensor:
    """Send results back and return those of the rows that left here."""
    return _MOE_RETURN(*arguments)
