"""Micro-batch overlap: layers run on two halves of a batch (``overlap_microbatches``).

The phases call the layer's own methods (``attention_input``, ``project_qkv``, ``attend``, ``route``
and so on), between which a module that communicates starts and waits for its communication.

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
from fusedops.parallel.expert.layer import ExpertExchange
from fusedops.parallel.microbatch_overlap import (
    Phases,
    run_interleaved,
    start_from_tensor_parallel,
    start_to_tensor_parallel,
)
from fusedops.parallel.tensor.layers import ParallelGatedMLP, ParallelLayer, ParallelMLP, RowLinear
from fusedops.parallel.tensor.replicated import ParameterSubstitution

# Phases that the second half is behind: communication of one half then overlaps products, never a
# norm, of the other.
_LEAD = 2


class Routed(NamedTuple):
    """The router's logits of some tokens, and the experts that they chose."""

    logits: torch.Tensor
    expert_ids: torch.Tensor


def overlap_microbatches(model: Transformer) -> None:
    """Make a model's layers run on two halves of each batch in alternating phases."""
    layer: Any
    for layer in model.layers.values():
        layer.forward = _OverlappedLayer(layer)
        if isinstance(layer.feed_forward, MoE):
            experts: Any = layer.feed_forward.experts
            experts.forward = _OverlappedExperts(experts)
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
        split, run the layers on the whole batch.
        """
        is_whole = torch.compiler.is_compiling() or context.kv_cache is not None
        sizes = [-(-x_BSH.shape[0] // 2), x_BSH.shape[0] // 2]
        if is_whole or (sizes[1] == 0 and not self._has_exchanges()):
            return super().forward(x_BSH, context, norm, query_positions)
        xs = x_BSH.split(sizes)
        contexts = _split(context, sizes, self)
        query_inputs: list[Any] = [None, None]
        auxiliary = torch.zeros((), device=x_BSH.device)
        for layers in self._runs(has_query_layer=query_positions is not None):
            if query_positions is not None and _is_last(layers[-1]):
                assert norm is not None
                with _shared_once([norm]):
                    xs = tuple(norm(x) for x in xs)
                queries = query_positions(context.positions)
                halves = [queries] * 2 if queries.dim() == 2 else queries.split(sizes)
                query_inputs = [q.expand_as(x) for q, x in zip(halves, xs, strict=True)]
            run = layers[0] if len(layers) == 1 else _LayerRun(layers)
            xs, extra = run(xs, contexts, query_inputs)
            auxiliary = auxiliary if extra is None else auxiliary + extra
        return torch.cat(xs), auxiliary

    def _has_exchanges(self) -> bool:
        """Whether experts are on other ranks: an empty half takes part in their communication."""
        layers: Any = self.values()
        parts = [layer.feed_forward for layer in layers]
        return any(isinstance(part, MoE) and _exchange_of(part) is not None for part in parts)

    def _runs(self, *, has_query_layer: bool) -> list[list[Layer]]:
        """Return the layers in runs; the two halves are synchronized between runs."""

        def is_joined(layer: Any) -> bool:
            return _is_plain(layer) and not (has_query_layer and _is_last(layer))

        runs: list[list[Any]] = []
        for joined, group in groupby(self.values(), is_joined):
            layers = list(group)
            runs += [layers] if joined else [[layer] for layer in layers]
        return runs


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
        split["documents"] = [Documents(ids) for ids in halves(context.documents.ids_BS)]
    if context.dropout_seeds is not None:
        layer: Any = next(iter(layers.values()))
        length, seeds = context.positions.shape[-1], context.dropout_seeds
        later = seeds_of_later_sequences(seeds, sizes[0], length, layer.config)
        split["dropout_seeds"] = [seeds, later]
    return [replace(context, **{name: pair[i] for name, pair in split.items()}) for i in range(2)]


def _is_last(layer: Any) -> bool:
    """Whether a layer is the last one of the whole model."""
    return layer.index == layer.config.num_layers - 1


def _is_plain(layer: nn.Module) -> bool:
    """Whether no hook and no wrapper needs the call of a layer."""
    return isinstance(layer.forward, _OverlappedLayer) and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _LayerRun:
    """Calls layers that follow each other, for two halves of a batch."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        contexts: Sequence[ForwardContext],
        query_inputs: Sequence[torch.Tensor | None],
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the halves after the layers, and the sum of the auxiliary losses."""
        for layer in self._layers:
            _check_not_wrapped(layer)
        halves = zip(xs, contexts, query_inputs, strict=True)
        with _shared_once(self._layers), summed(True):
            phases = [self._phases(*half, late=i == 0) for i, half in enumerate(halves)]
            results = run_interleaved(phases, lead=_LEAD)
            pairs = zip(*(routed for _, routed in results), strict=True)
            losses = [
                _auxiliary_loss(layer, pair, contexts[0])
                for layer, pair in zip(self._layers, pairs, strict=True)
            ]
            some = [loss for loss in losses if loss is not None]
        return tuple(x for x, _ in results), sum(some[1:], some[0]) if some else None

    def _phases(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None,
        *,
        late: bool,
    ) -> Phases[list[Routed | None]]:
        """Run the layers on one half; yields where the other half runs a phase."""
        routed = []
        for layer in self._layers:
            input_BSH = layer.attention_input(x_BSH)
            branch_BSH = yield from _attention(layer, input_BSH, context, query_input_BSH)
            input_BSH, x_BSH = layer.feed_forward_input(branch_BSH, x_BSH, context)
            branch_BSH, of_layer = yield from _feed_forward(layer, input_BSH, context, late)
            x_BSH = layer.add_feed_forward(branch_BSH, x_BSH, context)
            routed.append(of_layer)
        return x_BSH, routed


def _check_not_wrapped(layer: Layer) -> None:
    """Raise where a memory policy wraps a module whose parts the phases call: it has no effect."""
    part: Any = layer.feed_forward
    modules: dict[str, nn.Module] = {"attention": layer.attention}
    if isinstance(part, (MoE, ParallelMLP, ParallelGatedMLP)):
        modules["feed_forward"] = part
    if isinstance(part, MoE):
        modules["feed_forward.experts"] = part.experts
    for name, module in modules.items():
        if isinstance(module.__dict__.get("forward"), Wrapped):
            raise UnsupportedError(
                f"overlap_microbatches: layers.{layer.index}.{name} must not be named by a memory "
                "policy, because its parts run in phases of their own: name 'layers.*', norms or "
                "operators"
            )


class _OverlappedLayer:
    """Replaces ``Layer.forward``: takes two halves, or a whole batch as the layer does."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, x: Any, context: Any, query_input: Any = None) -> Any:
        layer = self._layer
        if isinstance(x, torch.Tensor):
            return Layer.forward(layer, x, context, query_input)
        run = _LayerRun([layer])
        part = layer.feed_forward
        if isinstance(part, MoE) and _has_hooks(part.experts):
            return part.experts(run, x, context, query_input)
        return run(x, context, query_input)


class _OverlappedExperts:
    """Replaces the experts' ``forward``; given a ``_LayerRun``, runs it inside of their hooks.

    Experts that FSDP2 shards over other ranks than the rest of a layer are gathered by a call of
    their own: the layer's phases run inside of one.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self.around = experts.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], _LayerRun):
            return args[0](*args[1:])
        if self.around is not None:
            return self.around(*args, **kwargs)
        return type(self._experts).forward(self._experts, *args, **kwargs)


@contextmanager
def _shared_once(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let both halves read the same tensors for parameters that are shared with other ranks."""
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                around = _around(part)
                if isinstance(part, ParallelLayer):
                    stack.enter_context(part.reuse_parameters())
                elif isinstance(around, ParameterSubstitution):
                    stack.enter_context(around.reuse_parameters())
        yield


def _auxiliary_loss(
    layer: Layer, halves: Sequence[Routed | None], context: ForwardContext
) -> torch.Tensor | None:
    """Return the router's loss over the tokens of both halves."""
    if halves[0] is None:
        return None
    logits, expert_ids = (torch.cat(tensors) for tensors in zip(*halves, strict=True))
    return layer.auxiliary_loss(logits, expert_ids, context)


def _attention(
    layer: Layer,
    x_BSH: torch.Tensor,
    context: ForwardContext,
    query_input_BSH: torch.Tensor | None,
) -> Any:
    part: Any = layer.attention
    row = part.output
    if not isinstance(row, RowLinear):
        yield "query, key, value"
        heads = part.project_qkv(x_BSH, context, query_input_BSH)
        yield "attention"
        branch_BSH = row(part.attend(*heads, context))
        yield "norm"
        return branch_BSH
    enters = [
        None if x is None else start_to_tensor_parallel(x, row.group, sequence=row.sequence)
        for x in (x_BSH, query_input_BSH)
    ]
    yield "query, key, value"
    x_BSH, query_input_BSH = (None if x is None else x.wait() for x in enters)  # type: ignore[assignment]
    heads = part.project_qkv(x_BSH, context, query_input_BSH)
    yield "attention"
    partial_sum = row.product(part.attend(*heads, context))
    leaves = start_from_tensor_parallel(partial_sum, row.group, sequence=row.sequence)
    yield "norm"
    return row.biased(leaves.wait())


def _feed_forward(layer: Layer, x_BSH: torch.Tensor, context: ForwardContext, late: bool) -> Any:
    part: Any = layer.feed_forward
    if isinstance(part, MoE):
        return (yield from _experts(layer, part, x_BSH, context, late))
    if not isinstance(part, (ParallelMLP, ParallelGatedMLP)):
        yield "feed-forward"
        branch_BSH = part(x_BSH)
        yield "nothing"
        yield "norm"
        return branch_BSH, None
    enters = start_to_tensor_parallel(x_BSH, part.group, sequence=part.sequence)
    yield "feed-forward, in"
    inner = part.inner(enters.wait())
    yield "feed-forward, out"
    leaves = start_from_tensor_parallel(part.product(inner), part.group, sequence=part.sequence)
    yield "norm"
    return part.biased(leaves.wait()), None


def _experts(
    layer: Layer, part: MoE, x_BSH: torch.Tensor, context: ForwardContext, late: bool
) -> Any:
    x_BSH = context.partition.shard_tokens(x_BSH)
    logits, plan = layer.route(x_BSH, context)
    rows = x_BSH.flatten(0, 1)
    exchange = _exchange_of(part)
    dispatch = None
    if exchange is not None:
        dispatch = exchange.start(_forward_of(part.experts), rows, plan)
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
            output = _forward_of(part.experts)(rows, plan)
    yield "norm"
    output = output if dispatch is None else dispatch.combine_wait()
    branch_BSH = output.view_as(x_BSH)
    branch_BSH = branch_BSH if shared_BSH is None else branch_BSH + shared_BSH
    routed = None if logits is None else Routed(logits, plan.expert_ids)
    return context.partition.gather_tokens(branch_BSH), routed


def _around(module: nn.Module) -> Any:
    """Return what stands as a module's forward, below policies and micro-batch overlap."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Wrapped):
        forward = forward.before
    return forward.around if isinstance(forward, _OverlappedExperts) else forward


def _forward_of(experts: nn.Module) -> Callable[..., Any]:
    """Return what computes, without hooks and exchange: parameters stand ready."""
    return partial(type(experts).forward, experts)


def _exchange_of(part: MoE) -> ExpertExchange | None:
    """Return how experts are reached that lie on other ranks."""
    around = _around(part.experts)
    call = around.call if isinstance(around, ParameterSubstitution) else None
    return call if isinstance(call, ExpertExchange) else None
