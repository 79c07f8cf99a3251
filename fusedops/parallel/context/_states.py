"""States of operators over sequences that are sharded over a group of ranks.

A sequence has ``n`` parts (contiguous shards) or ``2 n`` (zigzag). The state after a part is the
initial state of the next, which another rank has. States travel in slices of the heads: a rank
computes a slice while the rank of the part before computes the next slice. Gradients of states
travel in the opposite direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedops._core import checks, dtypes
from fusedops._core.library import define_exchange
from fusedops.parallel.comm import collectives


class Parts(NamedTuple):
    """The parts of a sequence in order, and those of this rank."""

    group: dist.ProcessGroup
    owners: list[int]  # the rank of each part
    own: list[int]  # the parts of this rank
    rows: list[slice]  # their tokens among those of this rank

    @property
    def last(self) -> int:
        """The number of the last part."""
        return len(self.owners) - 1

    def deliver(
        self, outgoing: Mapping[int, Tensor], arriving: Sequence[int], by: int, like: Tensor
    ) -> dict[int, Tensor]:
        """Send tensors to parts, by part, and return those that arrive for parts of this rank.

        Part ``p`` gets the tensor of part ``p - by``. All ranks call it together; tensors are
        contiguous, of the shape and dtype of ``like``.
        """
        rank, size = self.group.rank(), like.numel()
        sends = {self.owners[p]: x for p, x in outgoing.items() if self.owners[p] != rank}
        sources = {self.owners[p - by]: p for p in arriving if self.owners[p - by] != rank}
        counts, label = dict.fromkeys(sources, size), "states" if by == 1 else "state gradients"
        pending = collectives.exchange(
            sends, counts, self.group, longest=size, like=like, label=label
        )
        received = pending.wait().view(len(sources), *like.shape)
        arrived = {p: x for p, x in outgoing.items() if self.owners[p] == rank}
        return arrived | {sources[r]: x for r, x in zip(sorted(sources), received, strict=True)}


def parts_of(group: dist.ProcessGroup, balance: str, tokens: int) -> Parts:
    """Return the parts of sequences of which each rank has ``tokens`` tokens."""
    owners, rows, middle = list(range(group.size())), [slice(0, tokens)], (tokens + 1) // 2
    if balance == "zigzag" and group.size() > 1:
        owners, rows = owners + owners[::-1], [slice(0, middle), slice(middle, tokens)]
    own = [part for part, rank in enumerate(owners) if rank == group.rank()]
    return Parts(group, owners, own, rows)


def _shift(edges: Tensor, balance: str, group: str, by: int) -> Tensor:
    parts, edges = parts_of(collectives.group_of(group), balance, 0), edges.contiguous()
    received, known = torch.zeros_like(edges), range(len(parts.owners))
    outgoing = {p + by: x for p, x in zip(parts.own, edges, strict=True) if p + by in known}
    arriving = [p for p in parts.own if p - by in known]
    for part, tensor in parts.deliver(outgoing, arriving, by, received[0]).items():
        received[parts.own.index(part)] = tensor
    return received


def _save_direction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.balance, ctx.group, ctx.by = inputs


# Takes ``[parts of this rank, ...]``; returns for each what part ``- by`` has, and 0 for the first.
SHIFT = define_exchange(
    "context_shift",
    "(Tensor edges, str balance, str group, int by) -> (Tensor received)",
    kernel=_shift,
    fake=lambda edges, *_: torch.empty_like(edges, memory_format=torch.contiguous_format),
    setup_context=_save_direction,
    backward=lambda ctx, grad: (SHIFT(grad, ctx.balance, ctx.group, -ctx.by), None, None, None),
)


class Operator(NamedTuple):
    """An operator with a state for each head. ``initial_state`` follows its other tensors."""

    name: str
    tensors: int  # the number of its tensors before initial_state
    output: int  # the place of the tensor that has the shape of the output
    shared: int  # the place of the tensor whose heads several heads of the output share
    state: tuple[int, int]  # the places of the tensors whose last dims are those of the state


class _Call:
    """The arguments of a call on this rank, and the slices of heads in which it is computed."""

    def __init__(self, operator: Operator, args: Sequence[Any]) -> None:
        *values, balance, group = args
        self.tensors, self.initial_state = values[: operator.tensors], values[operator.tensors]
        self.numbers = values[operator.tensors + 1 :]
        self.like = self.tensors[operator.output]
        self.dtype = dtypes.statistics_dtype(self.like.dtype)
        batch, tokens, heads, _ = self.like.shape
        self.parts = parts_of(collectives.group_of(group), balance, tokens)
        sizes = [self.tensors[place].shape[3] for place in operator.state]
        self.state_shape = (batch, heads, *sizes)
        shared = self.tensors[operator.shared].shape[2]
        # Each slice reads complete shared heads, or a part of one.
        self.slices = max(
            count
            for count in range(1, 4 * self.parts.last + 2)
            if heads % count == 0 and (shared % count == 0 or count % shared == 0)
        )

    def heads(self, tensor: Tensor, dim: int, index: int) -> Tensor:
        """Return what a slice of the heads of the output reads of ``dim``."""
        size = tensor.shape[dim]
        start, stop = index * size // self.slices, -(-(index + 1) * size // self.slices)
        return tensor.narrow(dim, start, stop - start)

    def cut(self, tensor: Any, part: int, index: int) -> Any:
        """Return the tokens of a part and a slice of heads of an argument, or of its gradient."""
        if tensor is None or tensor.dim() == 1:
            return tensor if tensor is None else self.heads(tensor, 0, index)
        return self.heads(tensor[:, self.parts.rows[self.parts.own.index(part)]], 2, index)

    def gradient_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return a wide dtype for parameters and shared heads: several calls add to these."""
        shared = tensor.dim() == 1 or tensor.shape[2] % self.slices
        return self.dtype if shared else tensor.dtype

    def sweep(self, by: int, compute: Callable[[int, int, Tensor | None], Tensor]) -> None:
        """Call ``compute(part, slice, arrived)`` in order; it returns what the next part gets."""
        parts, (batch, heads, *sizes) = self.parts, self.state_shape
        places = {part: part if by == 1 else parts.last - part for part in parts.own}
        like = self.like.new_empty((batch, heads // self.slices, *sizes), dtype=self.dtype)
        arrived: dict[int, Tensor] = {}
        for step in range(self.slices + parts.last):
            outgoing = {}
            for part, place in places.items():
                if 0 <= step - place < self.slices:
                    state = compute(part, step - place, arrived.get(part))
                    if place < parts.last:
                        outgoing[part + by] = state.contiguous()
            arriving = [p for p, q in places.items() if q and 0 <= step + 1 - q < self.slices]
            arrived = parts.deliver(outgoing, arriving, by, like)


def _forward(operator: Operator, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the state after the last part, and the initial states of the parts."""
    call, op = _Call(operator, args), getattr(torch.ops.fusedops, operator.name)
    output, final, states = _empty(operator, *args)
    final.zero_()
    states.zero_()
    if call.parts.own[0] == 0 and call.initial_state is not None:
        states[0] = call.initial_state

    def compute(part: int, index: int, arrived: Tensor | None) -> Tensor:
        initial = call.heads(states[call.parts.own.index(part)], 1, index)
        if arrived is not None:
            initial.copy_(arrived)
        tensors = [call.cut(tensor, part, index) for tensor in call.tensors]
        result, state = op(*tensors, initial, None, *call.numbers)
        call.cut(output, part, index).copy_(result)
        if part == call.parts.last:
            call.heads(final, 1, index).copy_(state)
        return state

    call.sweep(1, compute)
    return output, final, states


def _empty(operator: Operator, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the results of ``_forward``."""
    call = _Call(operator, args)
    shape = (len(call.parts.own), *call.state_shape)
    states = call.like.new_empty(shape, dtype=call.dtype)
    return call.like.new_empty(call.like.shape), torch.empty_like(states[0]), states


def _backward(operator: Operator, *args: Any) -> list[Tensor]:
    """Return the gradients of the tensors that the mask asks for."""
    grad_output, grad_final, states, *values, mask = args
    call, op = _Call(operator, values), getattr(torch.ops.fusedops, f"{operator.name}_backward")
    known = [*call.tensors, states[0]]
    grads = [
        torch.zeros(tensor.shape, dtype=call.gradient_dtype(tensor), device=tensor.device)
        if asked
        else None
        for tensor, asked in zip(known, mask, strict=True)
    ]

    def compute(part: int, index: int, arrived: Tensor | None) -> Tensor:
        if arrived is None and grad_final is not None:
            arrived = call.heads(grad_final, 1, index)
        tensors = [call.cut(tensor, part, index) for tensor in call.tensors]
        initial = call.heads(states[call.parts.own.index(part)], 1, index)
        incoming = call.cut(grad_output, part, index), arrived
        asked = [*mask[:-1], True]
        *results, state = op(*incoming, *tensors, initial, None, *call.numbers, asked)
        for grad, result in zip(grads, results, strict=False):
            if grad is not None:
                call.cut(grad, part, index).add_(result)
        if part == 0 and grads[-1] is not None:
            call.heads(grads[-1], 1, index).copy_(state)
        return state

    call.sweep(-1, compute)
    return [g.to(x.dtype) for g, x in zip(grads, known, strict=True) if g is not None]


def _empty_gradients(operator: Operator, *args: Any) -> list[Tensor]:
    _, _, states, *values, mask = args
    known = zip([*values[: operator.tensors], states[0]], mask, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, asked in known if asked]


def define(operator: Operator) -> Callable[..., Any]:
    """Register an operator over shards and its backward; return the former.

    It takes the arguments of ``operator`` except ``cu_seqlens``, then balance and group.
    """
    name, count = f"context_{operator.name}", operator.tensors + 1
    schema = str(getattr(torch.ops.fusedops, operator.name).default._schema)
    arguments = schema.partition("(")[2].partition(") ->")[0].replace(" Tensor? cu_seqlens,", "")
    arguments += ", str balance, str group"

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:count], output[2])
        ctx.others = inputs[count:]
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad_output: Any, grad_final: Any, _: Any) -> tuple[Any, ...]:
        *tensors, states = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(tensors[operator.output])
        mask = list(ctx.needs_input_grad[:count])
        grads = iter(backward(grad_output, grad_final, states, *tensors, *ctx.others, mask))
        return *(next(grads) if asked else None for asked in mask), *[None] * len(ctx.others)

    def refuse(ctx: Any, *_: Any) -> None:
        raise checks.UnsupportedError(f"{name}: has no second derivative")

    backward = define_exchange(
        f"{name}_backward",
        f"(Tensor grad_output, Tensor? grad_state, Tensor states, {arguments}, bool[] output_mask)"
        " -> Tensor[]",
        kernel=functools.partial(_backward, operator),
        fake=functools.partial(_empty_gradients, operator),
        setup_context=lambda ctx, inputs, output: None,
        backward=refuse,
    )
    return define_exchange(
        name,
        f"({arguments}) -> (Tensor output, Tensor final_state, Tensor states)",
        kernel=functools.partial(_forward, operator),
        fake=functools.partial(_empty, operator),
        setup_context=save,
        backward=gradients,
    )
