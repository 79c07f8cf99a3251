"""The exchanges of expert parallelism as torch operators, for compiled graphs.

A compiler sees tensors in and tensors out; whatever needs the host (counts, agreement, collectives)
happens inside, by the code that runs eagerly. How many rows arrive is a symbol, or a bound that the
caller gave. Counts travel from dispatch to combine as int64 tensors on the CPU, and an anchor, a
float32 scalar, ties the two together in the graph of gradients: also a rank without rows takes part
in every exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core.library import define_exchange
from fusedops.ops import RoutingPlan, moe_sort, moe_unpermute
from fusedops.ops._moe_payload import PayloadLayout
from fusedops.parallel._agreement import Rows
from fusedops.parallel._departure import start
from fusedops.parallel._exchange import end
from fusedops.parallel._flat import Flat, promised, verdict, wants_gradient
from fusedops.parallel._hops import FromExperts, Route, ToExperts


@dataclass(frozen=True, eq=False)
class Sent:
    """What was dispatched by an operator, and the way back; made of tensors and constants.

    Attributes:
        plan: the routing of the tokens at home.
        counts: int64 ``[2, ranks]`` on the CPU, rows sent to each rank and received from each.
        anchor: of the graph of gradients.
        like: ``[0, H]``, of the dtype and device of the rows.
        max_rows: the bound of the rows, or ``None``.
        group: the process group's name.
    """

    plan: RoutingPlan
    counts: torch.Tensor
    anchor: torch.Tensor
    like: torch.Tensor
    max_rows: int | None
    group: str

    def come_home(self, output: torch.Tensor, *, weighted: bool) -> torch.Tensor:
        """Send the experts' results back and sum the slots of each token."""
        room = self.plan.permutation.shape[0]
        rows = _MOE_RETURN(
            output, self.anchor, self.counts, self.like, room, self.max_rows, self.group
        )
        return moe_unpermute(rows, self.plan, weighted=weighted)


def send(
    op: str,
    input: torch.Tensor,
    plan: RoutingPlan,
    group: dist.ProcessGroup,
    payload: str | None,
    max_rows: int | None,
) -> tuple[torch.Tensor, RoutingPlan, torch.Tensor, int, Sent]:
    """Return the rows, their plan, dropped slots per rank, bytes of a row and the way back."""
    quantized = payload == "float8"
    rows, probs, ids, counts, dropped, anchor = _MOE_SEND(
        input,
        plan.probs,
        plan.expert_ids,
        plan.permutation,
        plan.positions,
        plan.offsets,
        plan.num_experts,
        payload,
        wants_gradient(input, plan.probs),
        max_rows,
        op,
        group.group_name,
    )
    experts = plan.num_experts // group.size()
    order = moe_sort(ids, experts)
    # Without a bound every row is real; the rows that fill one up are nobody's.
    kept = None if max_rows is None else ids < experts
    local_plan = RoutingPlan(ids, probs, *order, kept, experts)
    like = input.detach()[:0]
    row_bytes = PayloadLayout(input.shape[1], input.dtype, probs.dtype, 1, quantized).stride
    sent = Sent(plan, counts, anchor, like, max_rows, group.group_name)
    return rows, local_plan, dropped, row_bytes, sent


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _send(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor,
    permutation: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    num_experts: int,
    payload: str | None,
    grads: bool,
    max_rows: int | None,
    op: str,
    group: str,
) -> tuple[torch.Tensor, ...]:
    ranks = _group(group)
    # Counts of the experts at home are not sent, so the plan of the exchange has none.
    order = permutation, positions, offsets.new_empty(0), offsets
    plan = RoutingPlan(expert_ids, probs, *order, None, num_experts)
    (way,) = start(op, input, plan, [ranks], grads=grads, payload=payload, max_rows=max_rows)
    assert isinstance(way, Flat)
    travel = way.travel
    rows, arrived, anchor = end(travel.to, travel.ticket)
    experts = num_experts // ranks.size()
    first = experts * ranks.rank()
    ids = torch.where(travel.to.ids >= 0, travel.to.ids - first, experts)
    counts = torch.tensor([travel.rows.send, travel.rows.receive])
    return rows, arrived, ids, counts, torch.tensor(travel.agreement.dropped), anchor


def _send_fake(
    input: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor,
    permutation: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    num_experts: int,
    payload: str | None,
    grads: bool,
    max_rows: int | None,
    op: str,
    group: str,
) -> tuple[torch.Tensor, ...]:
    size = _group(group).size()
    # Rows are int32, and fewer than 2**31 as moe_sort demands.
    many: Any = max_rows
    if many is None:
        many = torch.library.get_ctx().new_dynamic_size(min=0, max=2**31 - 1)
    hidden = input.shape[1]
    layout = PayloadLayout(hidden, input.dtype, probs.dtype, 1, payload is not None)
    stride = hidden if layout.quantized else layout.stride // input.dtype.itemsize
    return (
        input.new_empty_strided((many, hidden), (stride, 1)),
        probs.new_empty((many, 1)),
        input.new_empty((many, 1), dtype=torch.int32),
        torch.empty((2, size), dtype=torch.int64, device="cpu"),
        torch.empty(size, dtype=torch.int64, device="cpu"),
        input.new_empty((), dtype=torch.float32),
    )


def _save_sent(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, probs, expert_ids, permutation, positions, offsets = inputs[:6]
    counts = output[3]
    ctx.save_for_backward(probs, expert_ids, permutation, positions, offsets, counts)
    ctx.constants = inputs[6], inputs[11]


def _sent_backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad_rows, grad_probs, *_, grad_anchor = grads
    num_experts, group = ctx.constants
    saved = ctx.saved_tensors
    results = _MOE_SEND_BACKWARD(grad_rows, grad_probs, grad_anchor, *saved, num_experts, group)
    return *results, *[None] * 10


def _send_backward(
    grad_rows: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_anchor: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor,
    permutation: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    num_experts: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = permutation, positions, offsets.new_empty(0), offsets
    plan = RoutingPlan(expert_ids, probs, *order, None, num_experts)
    layout = PayloadLayout(grad_rows.shape[1], grad_rows.dtype, probs.dtype, 1)
    counted = Rows(*counts.tolist())
    exchange = ToExperts(Route(plan, positions, expert_ids), layout, lambda: counted, _group(group))
    exchange.start_backward(grad_rows, grad_probs)
    grad_input, grad_home = exchange.finish_backward()
    return grad_input, grad_home


def _send_backward_fake(
    grad_rows: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_anchor: torch.Tensor,
    probs: torch.Tensor,
    expert_ids: torch.Tensor,
    permutation: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    num_experts: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = positions.shape[0]
    return grad_rows.new_empty((tokens, grad_rows.shape[1])), probs.new_empty(positions.shape)


def _return(
    output: torch.Tensor,
    anchor: torch.Tensor,
    counts: torch.Tensor,
    like: torch.Tensor,
    room: int,
    max_rows: int | None,
    group: str,
) -> torch.Tensor:
    came, ranks = Rows(*counts.tolist()), _group(group)
    wanted = sum(came.receive) if max_rows is None else max_rows
    problem = promised(output, wanted, like)
    told = verdict(ranks, like, problem)
    if problem is not None:
        output = like.new_zeros((wanted, like.shape[1]))  # what others wait for
    exchange = FromExperts(came, room, ranks)
    exchange.start(output)
    (rows,) = exchange.finish()
    if told is not None:
        told.wait()
    return rows


def _return_fake(
    output: torch.Tensor,
    anchor: torch.Tensor,
    counts: torch.Tensor,
    like: torch.Tensor,
    room: int,
    max_rows: int | None,
    group: str,
) -> torch.Tensor:
    return like.new_empty((room, like.shape[1]))


def _save_returned(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.constants = inputs[0].shape[0], inputs[6]


def _returned_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return *_MOE_RETURN_BACKWARD(grad, counts, *ctx.constants), *[None] * 5


def _return_backward(
    grad: torch.Tensor, counts: torch.Tensor, num_rows: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    exchange = FromExperts(Rows(*counts.tolist()), grad.shape[0], _group(group), num_rows)
    exchange.start_backward(grad)
    (grad_output,) = exchange.finish_backward()
    return grad_output, grad.new_zeros((), dtype=torch.float32)


def _return_backward_fake(
    grad: torch.Tensor, counts: torch.Tensor, num_rows: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_output = grad.new_empty((num_rows, grad.shape[1]))
    return grad_output, grad.new_empty((), dtype=torch.float32)


_MOE_SEND = define_exchange(
    "moe_send",
    "(Tensor input, Tensor probs, Tensor expert_ids, Tensor permutation, Tensor positions,"
    " Tensor offsets, SymInt num_experts, str? payload, bool grads, SymInt? max_rows, str op,"
    " str group) -> (Tensor rows, Tensor row_probs, Tensor row_ids, Tensor counts, Tensor dropped,"
    " Tensor anchor)",
    kernel=_send,
    fake=_send_fake,
    setup_context=_save_sent,
    backward=_sent_backward,
)
_MOE_SEND_BACKWARD = define_exchange(
    "moe_send_backward",
    "(Tensor grad_rows, Tensor grad_probs, Tensor grad_anchor, Tensor probs, Tensor expert_ids,"
    " Tensor permutation, Tensor positions, Tensor offsets, Tensor counts, SymInt num_experts,"
    " str group) -> (Tensor grad_input, Tensor grad_probs_home)",
    kernel=_send_backward,
    fake=_send_backward_fake,
)
_MOE_RETURN = define_exchange(
    "moe_return",
    "(Tensor output, Tensor anchor, Tensor counts, Tensor like, SymInt room, SymInt? max_rows,"
    " str group) -> (Tensor rows)",
    kernel=_return,
    fake=_return_fake,
    setup_context=_save_returned,
    backward=_returned_backward,
)
_MOE_RETURN_BACKWARD = define_exchange(
    "moe_return_backward",
    "(Tensor grad, Tensor counts, SymInt num_rows, str group)"
    " -> (Tensor grad_output, Tensor grad_anchor)",
    kernel=_return_backward,
    fake=_return_backward_fake,
)
