"""Micro-batch overlap: layers run on two halves of a batch (``overlap_microbatches``).

The phases call the layer's own methods (``attention_input``, ``project_qkv``, ``attend``, ``route``
and so on), between which a module that communicates starts and waits for its communication. Layers
are pre-norm and have ``tp`` or ``ep``; what else a model may have is refused.

Each half goes through a layer in phases, three for attention and three for the feed-forward part,
and the second half is two phases behind the first. Communication between two phases of one half
overlaps a phase of the other half, which always contains matrix products:

    first half    norm | products | products | norm ...    (attention, then feed-forward part)
    second half          norm ... two phases later

The phase after a norm communicates into the tensor-parallel region or dispatches to the experts,
the phase before a norm communicates out of it. Experts run in the last of three phases for the
first half and in the second phase for the second half, so that every all-to-all overlaps products.
Embedding, head and loss run on the whole batch; the router's auxiliary loss is one loss, computed
from the routing of both halves.

Layers with hooks (FSDP2) and wrapped layers (``fusedops.memory``) are called once with both halves,
so that their weights are gathered once; both halves then end at the end of that layer. Other layers
follow each other without such a synchronisation.

Letters of shapes as in ``transformer.py``; what ends in ``s`` are halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops._core.checks import UnsupportedError
from fusedops.memory.wrap import Wrapped
from fusedops.models.attention_core import Documents
from fusedops.models.forward_context import ForwardContext
from fusedops.models.parallelization.batch_partition import seeds_of_later_sequences
from fusedops.models.transformer import Layer, Transformer, TransformerLayers
from fusedops.nn import MoE
from fusedops.ops._weight_gradients import summed
from fusedops.parallel.comm.collectives import Pending
from fusedops.parallel.expert.layer import ExpertExchange
from fusedops.parallel.microbatch_overlap import Phases, run_interleaved, start_communication
from fusedops.parallel.tensor.layers import ParallelGatedMLP, ParallelLayer, ParallelMLP, RowLinear
from fusedops.parallel.tensor.replicated import ParameterSubstitution

# Phases that the second half is behind: communication of one half then overlaps products, never a
# norm, of the other.
_LEAD = 2
# Modules of a layer whose parts the phases call.
_IN_PHASES = ("attention", "feed_forward", "feed_forward.experts")


class Routed(NamedTuple):
    """The router's logits of some tokens, and the experts that they chose."""

    logits: torch.Tensor
    expert_ids: torch.Tensor


def overlap_microbatches(model: Transformer) -> None:
    """Make a model's layers run on two halves of each batch in alternating phases.

    Raises:
        UnsupportedError: the model is post-norm or has a query layer.
    """
    for name in ("post_norm", "query_layer"):
        if getattr(model.config, name):
            raise UnsupportedError(
                f"parallelize: overlap_microbatches must be False for a model with {name}: the "
                "phases are those of pre-norm layers"
            )
    layer: Any
    for layer in model.layers.values():
        modules = [layer]
        if isinstance(layer.feed_forward, MoE):
            modules.append(layer.feed_forward.experts)
        for module in modules:
            module.forward = _HookedForward(module)
    model.layers = OverlappedLayers(dict(model.layers.items()))


class OverlappedLayers(TransformerLayers):
    """Layers that run on two halves of a batch in alternating phases."""

    def forward(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        norm: nn.Module | None = None,
        query_positions: nn.Embedding | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``TransformerLayers.forward`` returns.

        Compiled code, which waits inside of its operators, and generation, which has no batch to
        split, run the layers on the whole batch. So does a batch of one sequence, unless experts
        are on other ranks: these may have more, and an empty half takes part in their exchanges.
        """
        sizes = [-(-x_BSH.shape[0] // 2), x_BSH.shape[0] // 2]
        is_whole = torch.compiler.is_compiling() or context.kv_cache is not None
        if is_whole or (sizes[1] == 0 and not any(map(_exchange_of, self.values()))):
            return super().forward(x_BSH, context, norm, query_positions)
        xs: Sequence[torch.Tensor] = x_BSH.split(sizes)
        contexts = _split(context, sizes, self)
        auxiliary = torch.zeros((), device=x_BSH.device)
        for is_plain, group in groupby(self.values(), _is_plain):
            layers: list[Any] = list(group)
            for run in [layers] if is_plain else [[layer] for layer in layers]:
                call = partial(_run_layers, run)
                if not is_plain:
                    part = run[0].feed_forward
                    if isinstance(part, MoE) and _has_hooks(part.experts):
                        call = partial(part.experts, call)
                    call = partial(run[0], call)
                xs, extra = call(xs, contexts)
                auxiliary = auxiliary if extra is None else auxiliary + extra
        return torch.cat(list(xs)), auxiliary


class _HookedForward:
    """Stands as the forward of a layer or its experts; given a ``partial``, calls it instead.

    So both halves run inside of the module's hooks, which gather its weights. FSDP2 may shard
    experts over other ranks than the rest of a layer: they then have hooks of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], partial):
            return args[0](*args[1:])
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _split(
    context: ForwardContext, sizes: Sequence[int], layers: TransformerLayers
) -> list[ForwardContext]:
    """Return the contexts of two halves of a batch."""

    def halves(tensor: torch.Tensor | None, has_batch: bool = True) -> Sequence[Any]:
        if tensor is None or not has_batch:
            return [tensor, tensor]
        return tensor.split(list(sizes))

    has_batch = context.positions.dim() == 2
    split: dict[str, Sequence[Any]] = {
        "positions": halves(context.positions, has_batch),
        "tokens": halves(context.tokens),
        "domains": halves(context.domains),
    }
    if context.rotary is not None:
        tables = (halves(table, has_batch) for table in context.rotary)
        split["rotary"] = list(zip(*tables, strict=True))
    if context.documents is not None:
        ids_of_halves = halves(context.documents.ids_BS)
        split["documents"] = [Documents(ids) if len(ids) else None for ids in ids_of_halves]
    if context.dropout_seeds is not None:
        layer: Any = next(iter(layers.values()))
        length, seeds = context.positions.shape[-1], context.dropout_seeds
        later = seeds_of_later_sequences(seeds, sizes[0], length, layer.config)
        split["dropout_seeds"] = [seeds, later]
    return [replace(context, **{name: pair[i] for name, pair in split.items()}) for i in range(2)]


def _is_plain(layer: nn.Module) -> bool:
    """Whether no hook and no wrapper needs the call of a layer."""
    return isinstance(layer.forward, _HookedForward) and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _run_layers(
    layers: Sequence[Layer], xs: Sequence[torch.Tensor], contexts: Sequence[ForwardContext]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the halves after layers that follow each other, and the sum of auxiliary losses."""
    for layer in layers:
        _check_not_wrapped(layer)
    with _shared_once(layers), summed(True):
        phases = [
            _phases(layers, x, context, late=i == 0)
            for i, (x, context) in enumerate(zip(xs, contexts, strict=True))
        ]
        results = run_interleaved(phases, lead=_LEAD)
        pairs = zip(*(routed for _, routed in results), strict=True)
        losses = [
            _auxiliary_loss(layer, pair, contexts[0])
            for layer, pair in zip(layers, pairs, strict=True)
        ]
    some = [loss for loss in losses if loss is not None]
    return tuple(x for x, _ in results), sum(some[1:], some[0]) if some else None


def _phases(
    layers: Sequence[Layer], x_BSH: torch.Tensor, context: ForwardContext, *, late: bool
) -> Phases[tuple[torch.Tensor, list[Routed | None]]]:
    """Run layers on one half; yields where the other half runs a phase."""
    all_routed = []
    for layer in layers:
        branch_BSH = yield from _attention(layer, layer.attention_input(x_BSH), context)
        input_BSH, x_BSH = layer.feed_forward_input(branch_BSH, x_BSH, context)
        routed: Routed | None = None
        if isinstance(layer.feed_forward, MoE):
            branch_BSH, routed = yield from _experts(
                layer, layer.feed_forward, input_BSH, context, late
            )
        else:
            branch_BSH = yield from _feed_forward(layer.feed_forward, input_BSH)
        x_BSH = layer.add_feed_forward(branch_BSH, x_BSH, context)
        all_routed.append(routed)
    return x_BSH, all_routed


def _attention(layer: Layer, x_BSH: torch.Tensor, context: ForwardContext) -> Phases[torch.Tensor]:
    part: Any = layer.attention
    row = part.output
    enters = _start_region(row, x_BSH)
    yield "query, key, value"
    heads = part.project_qkv(enters.wait(), context, None)
    yield "attention"
    leaves = _end_region(row, part.attend(*heads, context))
    yield "norm"
    return leaves()


def _feed_forward(part: Any, x_BSH: torch.Tensor) -> Phases[torch.Tensor]:
    if not isinstance(part, (ParallelMLP, ParallelGatedMLP)):
        yield "feed-forward"
        branch_BSH = part(x_BSH)
        yield "nothing"
        yield "norm"
        return branch_BSH
    enters = _start_region(part, x_BSH)
    yield "feed-forward, in"
    inner = part.inner(enters.wait())
    yield "feed-forward, out"
    leaves = _end_region(part, inner)
    yield "norm"
    return leaves()


def _start_region(part: Any, x_BSH: torch.Tensor) -> Pending:
    """Start the communication into the tensor-parallel region that ``part`` ends."""
    if not isinstance(part, ParallelLayer):
        return Pending(lambda: x_BSH)
    name = "gather_from_sequence" if part.sequence else "copy_to"
    return start_communication(name, x_BSH, part.group)


def _end_region(part: Any, inner: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Compute the last product of a region and start to reduce it; returns how to wait for it."""
    if not isinstance(part, (RowLinear, ParallelMLP, ParallelGatedMLP)):
        output = part(inner)
        return lambda: output
    name = "scatter_to_sequence" if part.sequence else "reduce_from"
    leaves = start_communication(name, part.product(inner), part.group)
    return lambda: part.biased(leaves.wait())


def _experts(
    layer: Layer, part: MoE, x_BSH: torch.Tensor, context: ForwardContext, late: bool
) -> Phases[tuple[torch.Tensor, Routed | None]]:
    x_BSH = context.partition.shard_tokens(x_BSH)
    logits, plan = layer.route(x_BSH, context)
    rows = x_BSH.flatten(0, 1)
    exchange = _exchange_of(layer)
    forward = partial(type(part.experts).forward, part.experts)  # parameters stand ready
    dispatch = None if exchange is None else exchange.start(forward, rows, plan)
    other_phase = "nothing" if part.shared_experts is None else "shared expert"
    shared_BSH, output = None, torch.empty(())
    for phase in ("first", "second"):
        computes = late == (phase == "second")
        yield "experts" if computes else other_phase
        if not computes:
            shared_BSH = part.shared(x_BSH)
            if dispatch is not None:
                dispatch.second_hop()
        elif dispatch is not None:
            dispatch.compute()
        else:
            output = forward(rows, plan)
    yield "norm"
    output = output if dispatch is None else dispatch.combine_wait()
    branch_BSH = output.view_as(x_BSH)
    branch_BSH = branch_BSH if shared_BSH is None else branch_BSH + shared_BSH
    routed = None if logits is None else Routed(logits, plan.expert_ids)
    return context.partition.gather_tokens(branch_BSH), routed


def _auxiliary_loss(
    layer: Layer, halves: Sequence[Routed | None], context: ForwardContext
) -> torch.Tensor | None:
    """Return the router's loss over the tokens of both halves."""
    if halves[0] is None:
        return None
    logits, expert_ids = (torch.cat(tensors) for tensors in zip(*halves, strict=True))
    return layer.auxiliary_loss(logits, expert_ids, context)


def _check_not_wrapped(layer: Layer) -> None:
    """Raise where a memory policy wraps a module whose parts the phases call: it has no effect."""
    for name, module in layer.named_modules():
        if name in _IN_PHASES and isinstance(module.__dict__.get("forward"), Wrapped):
            raise UnsupportedError(
                f"overlap_microbatches: layers.{layer.index}.{name} must not be named by a memory "
                "policy, because its parts run in phases of their own: name 'layers.*', norms or "
                "operators"
            )


@contextmanager
def _shared_once(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let both halves read the same tensors for parameters that are shared with other ranks."""
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                substitution = _substitution_of(part)
                if isinstance(part, ParallelLayer):
                    stack.enter_context(part.reuse_parameters())
                elif substitution is not None:
                    stack.enter_context(substitution.reuse_parameters())
        yield


def _substitution_of(module: nn.Module) -> ParameterSubstitution | None:
    """Return what gives a module its parameters, below policies and micro-batch overlap."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, (Wrapped, _HookedForward)):
        forward = forward.before
    return forward if isinstance(forward, ParameterSubstitution) else None


def _exchange_of(layer: Any) -> ExpertExchange | None:
    """Return how the experts of a layer are reached that lie on other ranks."""
    part = layer.feed_forward
    substitution = _substitution_of(part.experts) if isinstance(part, MoE) else None
    call = None if substitution is None else substitution.call
    return call if isinstance(call, ExpertExchange) else None
