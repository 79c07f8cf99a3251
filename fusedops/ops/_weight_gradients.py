"""Gradients of stacks of weights: the sum of what several calls give.

Autograd adds what a weight gets from several calls in the weight's dtype: in half precision each
gradient is rounded, and each sum of two again. Inside of ``summed`` grouped_mm and moe_mlp read
their parameters cut off from the graph, and an *anchor* stands for each of them there: a scalar,
one for all calls that read the parameter. Backwards, each call adds to one float32 buffer. The node
that made the anchor is run by the engine once all of them have, in any pass that asks for the
parameter; it rounds the buffer once and hands it on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable

from fusedops._core import dtypes
from fusedops.ops.linear_act import empty_gradient, records_graph

_HALF = (torch.bfloat16, torch.float16)


class GradientSum:
    """The gradient of one parameter: the sum of what the calls of a backward pass add to it."""

    def __init__(self) -> None:
        # By pass: one that failed half-way leaves nothing to the next.
        self._buffers: dict[int, torch.Tensor] = {}

    def buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what the running pass has added so far, zeros at first."""
        running = torch._C._current_graph_task_id()
        if running not in self._buffers:
            self._buffers[running] = _zeros(parameter)
        return self._buffers[running]

    def take(self) -> torch.Tensor | None:
        """Return the sum of the running pass and forget it."""
        return self._buffers.pop(torch._C._current_graph_task_id(), None)


GradientTarget = torch.Tensor | GradientSum | None


class SummedParameters(NamedTuple):
    """The parameters of a call whose gradients are summed with those of other calls."""

    parameters: list[Any]  # the same, cut off from the graph
    into: list[GradientSum | None]  # the sum of each, ``None`` where no gradient is asked for
    # Those of the sums, in their order: they stand behind the arguments of the call
    anchors: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Read:
    """A parameter that was read, kept so that its id stays its own."""

    parameter: torch.Tensor
    owner: torch.Tensor
    into: GradientSum
    anchor: torch.Tensor


_OPEN: ContextVar[dict[Any, _Read] | None] = ContextVar("fusedops_summed_gradients", default=None)


@contextlib.contextmanager
def summed(on: bool) -> Iterator[None]:
    """Sum the gradients of half-precision parameters in float32 over the calls inside, if ``on``.

    A parameter is known again where it is the same tensor, or the same view of one.
    """
    if not on or _OPEN.get() is not None:
        yield
        return
    token = _OPEN.set({})
    try:
        yield
    finally:
        _OPEN.reset(token)


def are_summed() -> bool:
    """Whether calls are inside of ``summed``; a compiled graph never is."""
    return not torch.compiler.is_compiling() and _OPEN.get() is not None


def shared(computed_in: torch.dtype, *parameters: torch.Tensor | None) -> SummedParameters | None:
    """Return what a call inside ``summed`` reads; ``None`` if it reads its parameters directly."""
    known = _OPEN.get()
    if known is None or computed_in not in _HALF or not records_graph(*parameters):
        return None
    if not all(parameter is None or _is_plain(parameter) for parameter in parameters):
        return None
    into: list[GradientSum | None] = []
    anchors = []
    for parameter in parameters:
        if parameter is None or not parameter.requires_grad:
            into.append(None)
            continue
        owner = _owner(parameter)
        layout = parameter.storage_offset(), parameter.shape, parameter.stride()
        key = (id(owner), parameter._version, *layout)
        if key not in known:
            total = GradientSum()
            known[key] = _Read(parameter, owner, total, _Anchor.apply(parameter, total))
        into.append(known[key].into)
        anchors.append(known[key].anchor)
    leaves = [None if parameter is None else _cut_off(parameter) for parameter in parameters]
    return SummedParameters(leaves, into, anchors)


@dataclass(frozen=True)
class AddGradientsOp:
    """An op, and the form of its backward that adds the gradients of parameters to buffers."""

    # Takes tensors, then others; returns the output, and what it keeps for the backward
    op: Callable[..., Any]
    # Takes a buffer or ``None`` per parameter, the gradient of the output, the tensors, what was
    # kept, the others and a mask; returns a gradient for each entry of it
    add_gradients: Callable[..., Any]
    tensors: int  # number of tensors that ``op`` takes
    inputs: tuple[int, ...]  # places among them of those whose gradients the mask asks for
    parameters: tuple[int, ...]  # places of the parameters


def call(
    form: AddGradientsOp,
    args: Sequence[Any],
    into: Sequence[GradientTarget],
    anchors: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Call an op whose parameters' gradients are added where ``into`` says.

    ``into`` has per parameter a buffer, which then gets its gradient instead of it, or a sum, or
    ``None``; ``anchors`` are those of the sums.
    """
    return _Added.apply(form, len(args), *args, *into, *anchors)


class _Added(torch.autograd.Function):
    """What is saved, and in which order, is what the op saves.

    Activation checkpointing inside of a function whose gradients are summed makes it again outside,
    by the op.
    """

    @staticmethod
    def forward(ctx: Any, form: AddGradientsOp, count: int, *args: Any) -> torch.Tensor:
        last = count + len(form.parameters)
        output, kept = form.op(*args[:count])
        ctx.save_for_backward(*args[: form.tensors], kept)
        ctx.form, ctx.others, ctx.into = form, args[form.tensors : count], args[count:last]
        ctx.anchors, ctx.places = len(args) - last, 2 + len(args)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        form, into = ctx.form, ctx.into
        *tensors, kept = ctx.saved_tensors
        parameters = [tensors[place] for place in form.parameters]
        if ctx.anchors > 0:
            nodes = [node for node, _ in ctx.next_functions[-ctx.anchors :]]
            buffers = _buffers_of_sums(into, nodes, parameters)
        else:
            needed = [ctx.needs_input_grad[2 + place] for place in form.parameters]
            buffers = [
                (_zeros(parameter) if to is None else to) if needs else None
                for to, parameter, needs in zip(into, parameters, needed, strict=True)
            ]
        mask = [ctx.needs_input_grad[2 + place] for place in form.inputs]
        results = form.add_gradients(*buffers, grad, *tensors, kept, *ctx.others, mask)
        grads: list[torch.Tensor | None] = [None] * ctx.places
        results = results if isinstance(results, (tuple, list)) else (results,)
        for place, result in zip(form.inputs, results, strict=True):
            grads[2 + place] = result
        for place, to, buffer in zip(form.parameters, into, buffers, strict=True):
            if to is None and buffer is not None:
                grads[2 + place] = buffer.to(tensors[place].dtype)
        # An anchor's gradient means nothing. That it is there orders streams, and says in a graph
        # of gradients that there is no second derivative.
        for place in range(ctx.places - ctx.anchors, ctx.places):
            grads[place] = grad.new_zeros((), dtype=torch.float32)
        return tuple(grads)


def _buffers_of_sums(
    into: Sequence[GradientSum | None],
    nodes: Sequence[Any],
    parameters: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return what a backward adds to; ``None`` where the pass does not come to the sum's node."""
    node = iter(nodes)
    return [
        to.buffer(parameter)
        if to is not None
        and parameter is not None
        and torch._C._will_engine_execute_node(next(node))
        else None
        for to, parameter in zip(into, parameters, strict=True)
    ]


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: GradientSum) -> torch.Tensor:
        ctx.total, ctx.dtype = total, parameter.dtype
        return parameter.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        total = ctx.total.take()
        return None if total is None else total.to(ctx.dtype), None


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    wide = dtypes.statistics_dtype(parameter.dtype)
    if parameter.dim() == 3:
        return empty_gradient(parameter, wide).zero_()
    return parameter.new_zeros(parameter.shape, dtype=wide)


def _cut_off(parameter: torch.Tensor) -> torch.Tensor:
    """Return it without its history; a view, by which others know what it is a part of."""
    with torch.no_grad():
        return parameter.view_as(parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its values itself: not one that is sharded, fake or wrapped."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _owner(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose gradient follows from that of ``parameter`` by its layout alone.

    That is the tensor it is a view of, if nothing else is between them: views of the same layout
    have the same gradient then. A function of the user's, or a hook, may do anything.
    """
    base, node = parameter._base, parameter.grad_fn
    if base is None or parameter._backward_hooks:
        return parameter
    while node is not None:
        if node is base.grad_fn or getattr(node, "variable", None) is base:
            return base
        if isinstance(node, BackwardCFunction):
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return parameter
