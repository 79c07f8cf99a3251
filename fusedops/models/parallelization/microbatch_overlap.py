"""Micro-batch overlap: layers run on two halves of a batch (``overlap_microbatches``).

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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops import ops
from fusedops.memory.wrap import Wrapped
from fusedops.models.dropout_seeds import ATTENTION, FEED_FORWARD, Draws, behind
from fusedops.models.transformer import Layer, Places, Transformer
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
    """What a router said of some tokens: its logits, and the experts that they chose."""

    logits: torch.Tensor
    expert_ids: torch.Tensor


class _Half(NamedTuple):
    """What a half of a batch brings to the layers."""

    x_BSH: torch.Tensor
    places: Places
    asking_BSH: torch.Tensor | None


def overlap_microbatches(model: Any) -> None:
    """Make a model's layers run on two halves of each batch in alternating phases."""
    layer: Any
    for layer in model.layers.values():
        layer.forward = _OverlappedLayer(layer)
        if isinstance(layer.feed_forward, MoE):
            experts: Any = layer.feed_forward.experts
            experts.forward = _OverlappedExperts(experts)
    model.through = _OverlappedForward(model)


class _OverlappedForward:
    """Stands as ``Transformer.through``; an object, so that a copied model has its own."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def __call__(
        self,
        x_BSH: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        drawn: Draws | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, config = self._model, self._model.config
        given = positions, document_ids, tokens, domains, drawn
        if torch.compiler.is_compiling():  # which waits inside of its operators
            return Transformer.through(model, x_BSH, *given)
        sizes = [-(-x_BSH.shape[0] // 2), x_BSH.shape[0] // 2]
        if sizes[1] == 0 and not _exchanges(model):
            return Transformer.through(model, x_BSH, *given)
        xs = x_BSH.split(sizes)
        at = [positions] * 2 if positions.dim() == 1 else positions.split(sizes)
        perhaps = document_ids, tokens, domains
        others = [[None] * 2 if each is None else each.split(sizes) for each in perhaps]
        draws = [drawn, drawn]
        if drawn is not None:
            features = {"heads": config.num_heads, "features": config.hidden_size}
            draws[1] = behind(drawn, sizes[0], tokens=x_BSH.shape[1], **features)
        places = [model._places(*each) for each in zip(xs, at, *others, draws, strict=True)]
        asking: list[Any] = [None, None]
        auxiliary = torch.zeros((), device=x_BSH.device)
        for layers in _runs(model):
            if _asks(model, layers[-1]):
                assert model.query_positions is not None
                with _held([model.norm]):
                    xs = tuple(model.norm(each) for each in xs)
                asks = model.query_positions(positions)
                parts = [asks] * 2 if asks.dim() == 2 else asks.split(sizes)
                asking = [a.expand_as(x) for a, x in zip(parts, xs, strict=True)]
            call = layers[0] if len(layers) == 1 else _OverlappedLayers(layers)
            xs, extra = call(xs, places, asking)
            auxiliary = auxiliary if extra is None else auxiliary + extra
        return torch.cat(xs), auxiliary


def _exchanges(model: Transformer) -> bool:
    """Whether ranks with other batches take part: an empty half goes with theirs."""
    parts = [layer.feed_forward for layer in model.layers.values()]
    return any(isinstance(each, MoE) and _exchange_of(each) is not None for each in parts)


def _runs(model: Transformer) -> list[list[Layer]]:
    """Return the layers in runs between which the halves meet."""
    runs: list[list[Any]] = []
    joins = False
    for layer in model.layers.values():
        alone = not _is_plain(layer) or _asks(model, layer)
        if joins and not alone:
            runs[-1].append(layer)
        else:
            runs.append([layer])
        joins = not alone
    return runs


def _asks(model: Transformer, layer: nn.Module) -> bool:
    """Whether a layer's queries are made of positions: the last one's, of some models."""
    name = str(model.config.num_layers - 1)
    if model.query_positions is None or name not in model.layers:
        return False
    return model.layers[name] is layer


def _is_plain(layer: nn.Module) -> bool:
    """Whether nothing stands around a layer that wants to see its call."""
    return isinstance(layer.forward, _OverlappedLayer) and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _OverlappedLayers:
    """Calls layers that follow each other, for two halves of a batch."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        places: Sequence[Places],
        asking: Sequence[torch.Tensor | None],
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the halves behind the layers, and the routers' losses."""
        halves = [_Half(*each) for each in zip(xs, places, asking, strict=True)]
        with _held(self._layers), summed(True):
            phases = [self._through(half, late=i == 0) for i, half in enumerate(halves)]
            found = run_interleaved(phases, lead=_LEAD)
            pairs = zip(*(routed for _, routed in found), strict=True)
            losses = map(_loss_of_router, self._layers, pairs)
            some = [each for each in losses if each is not None]
        return tuple(x for x, _ in found), sum(some[1:], some[0]) if some else None

    def _through(self, half: _Half, *, late: bool) -> Phases[list[Routed | None]]:
        x_BSH, routed = half.x_BSH, []
        for layer in self._layers:
            x_BSH, found = yield from _layer(layer, half._replace(x_BSH=x_BSH), late)
            routed.append(found)
        return x_BSH, routed


class _OverlappedLayer:
    """Stands as ``Layer.forward`` and takes halves; a whole batch goes through as ever."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, x: Any, places: Any, asking: Any = None) -> Any:
        layer = self._layer
        if isinstance(x, torch.Tensor):
            return Layer.forward(layer, x, places, asking)
        call = _OverlappedLayers([layer])
        part = layer.feed_forward
        if isinstance(part, MoE) and _has_hooks(part.experts):
            return part.experts(call, x, places, asking)
        return call(x, places, asking)


class _OverlappedExperts:
    """Stands as the experts' ``forward``; what it is given to call runs inside of their hooks.

    Experts that FSDP2 divides over other ranks than the rest of a layer are gathered by a call of
    their own: the layer's phases run inside of one.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self.around = experts.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], _OverlappedLayers):
            return args[0](*args[1:])
        if self.around is not None:
            return self.around(*args, **kwargs)
        return type(self._experts).forward(self._experts, *args, **kwargs)


@contextmanager
def _held(modules: Sequence[nn.Module]) -> Iterator[None]:
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


def _loss_of_router(layer: Layer, halves: Sequence[Routed | None]) -> torch.Tensor | None:
    """Return the router's loss over the tokens of both halves."""
    if halves[0] is None:
        return None
    logits, expert_ids = (torch.cat(each) for each in zip(*halves, strict=True))
    return layer.loss_of_router(logits, expert_ids)


def _layer(layer: Layer, half: _Half, late: bool) -> Phases[Routed | None]:
    """Go through a layer; as ``Layer.forward``."""
    x_BSH, places, asking_BSH = half
    seeds = [places.seed(layer.index, call) for call in (ATTENTION, FEED_FORWARD)]
    if layer.config.post_norm:
        branch_BSH = yield from _attention(layer, x_BSH, places, asking_BSH)
        x_BSH, _ = layer.attention_norm(branch_BSH, x_BSH, seed=seeds[0])
        branch_BSH, routed = yield from _feed_forward(layer, x_BSH, places, late)
        return layer.feed_forward_norm(branch_BSH, x_BSH, seed=seeds[1])[0], routed
    branch_BSH = yield from _attention(layer, layer.attention_norm(x_BSH), places, asking_BSH)
    normed_BSH, x_BSH = layer.feed_forward_norm(branch_BSH, x_BSH, seed=seeds[0])
    branch_BSH, routed = yield from _feed_forward(layer, normed_BSH, places, late)
    given = branch_BSH, None, x_BSH, layer.config.dropout, layer.training
    return ops.bias_dropout_add(*given, seed=seeds[1]), routed


def _attention(
    layer: Layer, x_BSH: torch.Tensor, places: Places, asking_BSH: torch.Tensor | None
) -> Any:
    part: Any = layer.attention
    row = part.output
    if not isinstance(row, RowLinear):
        yield "query, key, value"
        heads = part.split(x_BSH, places, asking_BSH)
        yield "attention"
        branch_BSH = row(part.meet(*heads, places))
        yield "norm"
        return branch_BSH
    enters = [
        None if each is None else start_to_tensor_parallel(each, row.group, sequence=row.sequence)
        for each in (x_BSH, asking_BSH)
    ]
    yield "query, key, value"
    given, asking = (None if each is None else each.wait() for each in enters)
    heads = part.split(given, places, asking)
    yield "attention"
    partial = row.product(part.meet(*heads, places))
    leaves = start_from_tensor_parallel(partial, row.group, sequence=row.sequence)
    yield "norm"
    return row.biased(leaves.wait())


def _feed_forward(layer: Layer, x_BSH: torch.Tensor, places: Places, late: bool) -> Any:
    part: Any = layer.feed_forward
    if isinstance(part, MoE):
        return (yield from _experts(layer, part, x_BSH, places, late))
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


def _experts(layer: Layer, part: MoE, x_BSH: torch.Tensor, places: Places, late: bool) -> Any:
    x_BSH = layer.take_tokens(x_BSH)
    logits, plan = layer.choose(x_BSH, places)
    rows = x_BSH.flatten(0, 1)
    exchange = _exchange_of(part)
    trip = None
    if exchange is not None:
        trip = exchange.start(_forward_of(part.experts), rows, plan)
    meanwhile = "nothing" if part.shared_experts is None else "shared expert"
    shared_BSH, output = None, torch.empty(())
    for place in ("first", "second"):
        computes = late == (place == "second")
        yield "experts" if computes else meanwhile
        if not computes:
            shared_BSH = part.shared(x_BSH)
            if trip is not None:
                trip.second_hop()
        elif trip is not None:
            trip.compute()
        else:
            output = _forward_of(part.experts)(rows, plan)
    yield "norm"
    output = output if trip is None else trip.combine_wait()
    branch_BSH = output.view_as(x_BSH)
    branch_BSH = branch_BSH if shared_BSH is None else branch_BSH + shared_BSH
    routed = None if logits is None else Routed(logits, plan.expert_ids)
    return layer.join_tokens(branch_BSH), routed


def _around(module: nn.Module) -> Any:
    """Return what stands as a module's forward, below policies and micro-batch overlap."""
    found = module.__dict__.get("forward")
    while isinstance(found, Wrapped):
        found = found.before
    return found.around if isinstance(found, _OverlappedExperts) else found


def _forward_of(experts: nn.Module) -> Callable[..., Any]:
    """Return what computes, without hooks and exchange: parameters stand ready."""
    return partial(type(experts).forward, experts)


def _exchange_of(part: MoE) -> ExpertExchange | None:
    """Return how experts are reached that lie on other ranks."""
    around = _around(part.experts)
    found = around.call if isinstance(around, ParameterSubstitution) else None
    return found if isinstance(found, ExpertExchange) else None
