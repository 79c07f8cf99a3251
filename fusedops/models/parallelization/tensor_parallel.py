"""The plan of tensor parallelism: which function shards which modules of a model.

A style changes one module, or returns another in its place with the same parameter names. Between
the modules activations are replicated over the ranks of ``tp``, or with sequence parallelism
sharded along the sequence (``sequence``). ``overlap`` makes communication overlap products.

Letters of shapes: B sequences, S tokens of each on the ranks of ``tp`` together, s a tp rank's of
them (with sequence parallelism), H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import ForwardContext
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parts import Head
from fusedops.nn import MLP, GatedMLP, MoE
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    distribute,
    local,
    to_tensor_parallel,
)
from fusedops.parallel.tensor.replicated import allreduce_gradients, local_chunk
from fusedops.parallel.tensor.vocabulary import (
    VocabParallelProjection,
    VocabularyEmbedding,
    vocab_parallel_cross_entropy,
)

_LOG = logging.getLogger("fusedops")


# Of a module and the ranks: the parallel form of the module, which is itself, changed, or another.
ParallelStyle: TypeAlias = Callable[[Any, DeviceMesh], nn.Module]


def tensor_parallel_plan(
    model: TransformerConfig, config: ParallelConfig
) -> dict[str, ParallelStyle]:
    """Return how ``tp`` shards the modules of a model, by their names.

    With sequence parallelism each rank has other tokens between the layers: the norms and tables
    there are replicated, and their gradients summed. Products overlap communication only then,
    block by block; with micro-batch overlap the products of the other half do.
    """
    sp = config.sp
    overlap = sp and config.overlap and not config.overlap_microbatches
    recompute = "activation" in config.recomputed
    column = partial(ColumnLinear.of, sequence=sp, communicate=False)
    plan: dict[str, ParallelStyle] = {
        "embedding.tokens": partial(VocabularyEmbedding.of, sequence=sp),
        "layers.*.attention": partial(shard_heads, sequence=sp),
        "layers.*.attention.query": column,
        "layers.*.attention.key": partial(column, heads=model.kv_heads),
        "layers.*.attention.value": partial(column, heads=model.kv_heads),
        "layers.*.attention.output": partial(RowLinear.of, sequence=sp, overlap=overlap),
        "layers.*.attention.query_up": column,
        "layers.*.attention.kv_up": column,
        "layers.*.attention.*_down": sum_gradients,
        "layers.*.attention.*_down_norm": sum_gradients,
        "layers.*.attention.kv_norm": sum_gradients,
        "layers.*.attention.query_norm": sum_gradients,
        "layers.*.attention.key_norm": sum_gradients,
        "layers.*.feed_forward": partial(
            shard_feed_forward, sequence=sp, overlap=overlap, recompute=recompute
        ),
        "layers.*.feed_forward.gate": sum_gradients,
        "layers.*.feed_forward.shared_experts": sum_gradients,
        "layers.*.feed_forward.shared_expert_gate": sum_gradients,
        "head": partial(VocabParallelHead.of, vocab_size=model.vocab_size, sequence=sp),
    }
    if sp:
        plan |= {
            "embedding.positions": shard_positions,
            "embedding.token_types": shard_positions,
            "embedding.norm": sum_gradients,
            "layers.*.attention_norm": sum_gradients,
            "layers.*.feed_forward_norm": sum_gradients,
            "norm": sum_gradients,
            "query_positions": shard_positions,
            "head.transform": sum_gradients,
            "head.norm": sum_gradients,
        }
    return plan


def apply_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Apply the styles of a plan to the modules they name; ``*`` matches any part of a name."""
    for pattern, style in plan.items():
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        for name in names:
            owner, _, child = name.rpartition(".")
            module = model.get_submodule(name)
            setattr(model.get_submodule(owner), child, style(module, mesh))
        if names:
            function = getattr(style, "func", style).__qualname__
            options = getattr(style, "keywords", {})
            _LOG.debug(
                "parallelize: tp: %d modules %s: %s %s", len(names), pattern, function, options
            )


def shard_heads(attention: Any, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    """Shard the heads of attention: queries, keys and values share one communication."""
    group, ranks = mesh.get_group(), mesh.size()
    attention.num_heads //= ranks
    attention.num_kv_heads = max(1, attention.num_kv_heads // ranks)
    attention.first_head = mesh.get_local_rank() * attention.num_heads

    def enter_region(module: nn.Module, args: Any) -> Any:
        x_BSH, context, query_input_BSH = args
        if query_input_BSH is not None:
            query_input_BSH = to_tensor_parallel(query_input_BSH, group, sequence=sequence)
        return to_tensor_parallel(x_BSH, group, sequence=sequence), context, query_input_BSH

    attention.register_forward_pre_hook(enter_region)
    return attention


def shard_feed_forward(
    module: Any, mesh: DeviceMesh, *, sequence: bool, overlap: bool, recompute: bool
) -> nn.Module:
    """Shard the hidden features of an MLP; experts are left to ``ep`` and to the partition."""
    if isinstance(module, MoE):
        return module
    if isinstance(module, GatedMLP):
        overlap = overlap and module.gate_proj.bias is None
        return ParallelGatedMLP.of(module, mesh, sequence=sequence, overlap=overlap)
    assert isinstance(module, MLP)
    return ParallelMLP.of(module, mesh, sequence=sequence, overlap=overlap and not recompute)


def sum_gradients(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Replicate a module over ranks that give it other tokens or heads, and sum its gradients."""
    allreduce_gradients(module, mesh)
    return module


def shard_positions(table: Any, mesh: DeviceMesh) -> nn.Module:
    """Replicate a table that is indexed by token, and look up this rank's tokens only."""
    group = mesh.get_group()
    allreduce_gradients(table, mesh)
    # Of indices ``[..., S]`` those of this rank's tokens, ``[..., s]``.
    table.register_forward_pre_hook(lambda _, args: (local_chunk(args[0], group, -1),))
    return table


class VocabParallelHead(Head):
    """A ``Head`` whose ``weight`` and ``bias`` are ``Shard(0)``; made by ``VocabParallelHead.of``.

    Attributes:
        projection: computes the logits of this rank's shard of the vocabulary, and gathers them.
    """

    projection: VocabParallelProjection
    _group: dist.ProcessGroup
    _sequence: bool

    @classmethod
    def of(
        cls, head: Head, mesh: DeviceMesh, vocab_size: int, *, sequence: bool
    ) -> VocabParallelHead:
        """Return a head with its vocabulary sharded; hooks are not copied."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.transform, self.norm, self.recompute = head.transform, head.norm, head.recompute
        for name in ("weight", "bias"):
            parameter: Any = getattr(head, name)
            parameter = distribute("parallelize", f"head.{name}", parameter, mesh, 0, uneven=True)
            self.register_parameter(name, parameter)
        self._group, self._sequence = mesh.get_group(), sequence
        self.projection = VocabParallelProjection(self._group, vocab_size)
        return self.train(head.training)

    def logits(self, x_BSH: torch.Tensor, weight: Any, context: ForwardContext) -> torch.Tensor:
        """Return logits of the whole vocabulary, or of this rank's shard."""
        x_BSH = to_tensor_parallel(x_BSH, self._group, sequence=self._sequence)
        if context.logits_to_keep is not None:
            x_BSH = x_BSH[:, context.logits_to_keep]
        shard = self.projection.local_logits(x_BSH, weight, self.bias)
        return self.projection.gather_logits(shard) if context.gather_logits else shard

    def loss(self, x_BSH: torch.Tensor, weight: Any, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' cross-entropies, the same on every rank."""
        return vocab_parallel_cross_entropy(
            to_tensor_parallel(x_BSH, self._group, sequence=self._sequence),
            local(weight),
            labels_BS,
            self._group,
            local(self.bias),
            vocab_size=self.projection.vocab_size,
            reduction="sum",
            recompute=self.recompute,
        )
