"""Micro-batch overlap: layers run on two halves of a batch (``overlap_microbatches``).

The phases call the layer's own methods (``attention_input``, ``project_qkv``, ``attend``, ``route``
and so on), between which a module that communicates starts and waits for its communication. Layers
are pre-norm and have ``tp`` or ``ep``; what else a model may have is refused.

Each half goes through a layer in phases, three for attention and three for the feed-forward part,
and the second half is two phases behind the first. Communication between two phases of one half
overlaps a phase of the other half, which always contains matrix products:

    first half    norm | products | products | norm ...    (attention, then feed-forward part)
    second half          norm ... two phases later

Experts run in the last of three phases for the first half and in the second phase for the second
half, so that every all-to-all overlaps products. Embedding, head and loss run on the whole batch;
the router's auxiliary loss is one loss, computed from the routing of both halves.

Letters of shapes as in ``transformer.py``; what ends in ``s`` are halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import nn

from fusedops._core.checks import UnsupportedError
from fusedops.memory.wrap import Wrapped
from fusedops.models.attention_core import Documents
from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import ForwardContext
from fusedops.models.parallelization.batch_partition import seeds_of_later_sequences
from fusedops.models.transformer import Layer, Transformer, TransformerLayers
from fusedops.nn import MoE
from fusedops.ops._weight_gradients import summed
from fusedops.parallel.microbatch_overlap import Phases, run_interleaved, start_communication
from fusedops.parallel.tensor.layers import ParallelGatedMLP, ParallelLayer, ParallelMLP

# Phases that the second half is behind: communication of one half then overlaps products, never a
# norm, of the other.
_LEAD = 2
# Modules of a layer whose parts the phases call.
_IN_PHASES = ("attention", "feed_forward", "feed_forward.experts")

_IDENTITY = nn.Identity()

# A phase: its name, and what it computes.
_Step: TypeAlias = tuple[str, Callable[[Any], Any]]
# Of each half the logits of a layer's router, and the experts that its tokens chose.
_Routed: TypeAlias = dict[Layer, list[tuple[torch.Tensor, torch.Tensor]]]


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
    for layer in model.layers.values():
        for module in _modules_with_weights(layer):
            module.forward = partial(_forward_or_call, module.forward)
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
        layers: list[Any] = list(self.values())
        is_whole = torch.compiler.is_compiling() or context.kv_cache is not None
        if is_whole or (len(x_BSH) < 2 and not any(map(_experts_on_ranks, layers))):
            return super().forward(x_BSH, context, norm, query_positions)
        first = -(-len(x_BSH) // 2)
        halves = slice(first), slice(first, None)
        xs: Any = x_BSH.split([first, len(x_BSH) - first])
        contexts = [_half(context, rows, layers[0].config) for rows in halves]
        auxiliary = torch.zeros((), device=x_BSH.device)
        # Layers that need no call follow each other, without a synchronization of the halves.
        for modules, group in groupby(layers, _called_modules):
            call = partial(_run_layers, list(group))
            for module in modules:
                call = partial(module, call)
            xs, extra = call(xs, contexts)
            auxiliary = auxiliary if extra is None else auxiliary + extra
        return torch.cat(xs), auxiliary


def _modules_with_weights(layer: Any) -> list[Any]:
    """Return experts and the layer: FSDP2 may shard experts over other ranks than the rest."""
    part = layer.feed_forward
    return [part.experts, layer] if isinstance(part, MoE) else [layer]


def _called_modules(layer: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules whose hooks or policy need a call, once with both halves."""
    return tuple(
        module
        for module in _modules_with_weights(layer)
        if module._forward_hooks or module._forward_pre_hooks or isinstance(module.forward, Wrapped)
    )


def _forward_or_call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand as the forward of a layer or its experts; given a ``partial``, call it instead.

    So both halves run inside of the module's hooks, which gather its weights once.
    """
    return args[0](*args[1:]) if isinstance(args[0], partial) else forward(*args, **kwargs)


def _half(context: ForwardContext, rows: slice, config: TransformerConfig) -> ForwardContext:
    """Return the context of some sequences of a batch."""
    tensors = {name: getattr(context, name) for name in ("positions", "tokens", "domains")}
    changes: dict[str, Any] = {
        name: tensor[rows]
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dim() == 2
    }
    if context.rotary is not None and "positions" in changes:
        changes["rotary"] = tuple(table[rows] for table in context.rotary)
    if context.documents is not None:
        ids_BS = context.documents.ids_BS[rows]
        changes["documents"] = Documents(ids_BS) if len(ids_BS) else None
    if context.dropout_seeds is not None and rows.start:
        seeds, tokens = context.dropout_seeds, context.positions.shape[-1]
        changes["dropout_seeds"] = seeds_of_later_sequences(seeds, rows.start, tokens, config)
    return replace(context, **changes)


def _run_layers(
    layers: Sequence[Layer], xs: Sequence[torch.Tensor], contexts: Sequence[ForwardContext]
) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """Return the halves after layers that follow each other, and the sum of auxiliary losses."""
    routed: _Routed = {}
    with _parameters_once(layers), summed(True):
        halves = zip(xs, contexts, (True, False), strict=True)
        phases = [_phases(layers, *half, routed) for half in halves]
        xs = tuple(run_interleaved(phases, lead=_LEAD))
        losses = [_auxiliary_loss(*of_layer, contexts[0]) for of_layer in routed.items()]
    present = [loss for loss in losses if loss is not None]
    return xs, sum(present[1:], present[0]) if present else None


def _phases(
    layers: Sequence[Layer],
    x_BSH: torch.Tensor,
    context: ForwardContext,
    late: bool,
    routed: _Routed,
) -> Phases[torch.Tensor]:
    """Run layers on one half; yields where the other half runs a phase."""
    for layer in layers:
        branch_BSH = yield from _attention(layer, layer.attention_input(x_BSH), context)
        input_BSH, x_BSH = layer.feed_forward_input(branch_BSH, x_BSH, context)
        if isinstance(layer.feed_forward, MoE):
            branch_BSH = yield from _experts(layer, input_BSH, context, late, routed)
        else:
            branch_BSH = yield from _feed_forward(layer.feed_forward, input_BSH)
        x_BSH = layer.add_feed_forward(branch_BSH, x_BSH, context)
    return x_BSH


def _attention(layer: Layer, x_BSH: torch.Tensor, context: ForwardContext) -> Phases[torch.Tensor]:
    part: Any = layer.attention
    return _region(
        part.output,
        x_BSH,
        ("query, key, value", lambda x_BSH: part.project_qkv(x_BSH, context, None)),
        ("attention", lambda heads: part.attend(*heads, context)),
    )


def _feed_forward(part: Any, x_BSH: torch.Tensor) -> Phases[torch.Tensor]:
    if not isinstance(part, (ParallelMLP, ParallelGatedMLP)):
        return _region(_IDENTITY, x_BSH, ("feed-forward", part), ("nothing", _IDENTITY))
    steps = ("feed-forward, in", part.inner), ("feed-forward, out", _IDENTITY)
    return _region(part, x_BSH, *steps)


def _region(end: Any, x_BSH: torch.Tensor, first: _Step, second: _Step) -> Phases[torch.Tensor]:
    """Run two phases and the product of ``end`` between the communications of its region."""
    is_parallel = isinstance(end, ParallelLayer)
    sequence, group = (end.sequence, end.group) if is_parallel else (False, None)
    enters = start_communication("gather_from_sequence" if sequence else "copy_to", x_BSH, group)
    yield first[0]
    inner = first[1](enters.wait())
    yield second[0]
    name, product = "scatter_to_sequence" if sequence else "reduce_from", end
    if is_parallel:
        product = end.product
    leaves = start_communication(name, product(second[1](inner)), group)
    yield "norm"
    return end.biased(leaves.wait()) if is_parallel else leaves.wait()


def _experts(
    layer: Layer,
    x_BSH: torch.Tensor,
    context: ForwardContext,
    late: bool,
    routed: _Routed,
) -> Phases[torch.Tensor]:
    part: Any = layer.feed_forward
    x_BSH = context.partition.shard_tokens(x_BSH)
    logits, plan = layer.route(x_BSH, context)
    if logits is not None:
        routed.setdefault(layer, []).append((logits, plan.expert_ids))
    rows, remote, dispatch = x_BSH.flatten(0, 1), _experts_on_ranks(layer), None
    if remote is not None:
        dispatch = remote.call.start(remote.plain, rows, plan)
    shared_BSH, output = None, torch.empty(())
    for computes in (not late, late):
        other_phase = "nothing" if part.shared_experts is None else "shared expert"
        yield "experts" if computes else other_phase
        if not computes:
            shared_BSH = part.shared(x_BSH)
            if dispatch is not None:
                dispatch.second_hop()
        elif dispatch is not None:
            dispatch.compute()
        else:
            output = type(part.experts).forward(part.experts, rows, plan)
    yield "norm"
    output = output if dispatch is None else dispatch.combine_wait()
    branch_BSH = output.view_as(x_BSH)
    branch_BSH = branch_BSH if shared_BSH is None else branch_BSH + shared_BSH
    return context.partition.gather_tokens(branch_BSH)


def _auxiliary_loss(layer: Layer, halves: Any, context: ForwardContext) -> torch.Tensor | None:
    """Return the router's loss over the tokens of both halves."""
    logits, expert_ids = map(torch.cat, zip(*halves, strict=True))
    return layer.auxiliary_loss(logits, expert_ids, context)


@contextmanager
def _parameters_once(layers: Sequence[Layer]) -> Iterator[None]:
    """Let both halves read the same tensors for parameters that are shared with other ranks.

    Raises:
        UnsupportedError: a memory policy wraps a module whose parts the phases call: it would have
            no effect.
    """
    with ExitStack() as stack:
        for layer, (name, module) in ((x, named) for x in layers for named in x.named_modules()):
            own = module.__dict__
            if name in _IN_PHASES and isinstance(own.get("forward"), Wrapped):
                raise UnsupportedError(
                    f"overlap_microbatches: layers.{layer.index}.{name} must not be named by a "
                    "memory policy, because its parts run in phases of their own: name "
                    "'layers.*', norms or operators"
                )
            owner: Any = module if isinstance(module, ParallelLayer) else own.get("substitution")
            if owner is not None:
                stack.enter_context(owner.reuse_parameters())
        yield


def _experts_on_ranks(layer: Any) -> Any:
    """Return the ``ParameterSubstitution`` of experts of which some are on other ranks."""
    experts = getattr(layer.feed_forward, "experts", None)
    return None if experts is None else experts.__dict__.get("substitution")
