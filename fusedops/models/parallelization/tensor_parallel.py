"""Parallel styles, which a plan names for the modules of a model, and the loop that applies a plan.

A style changes one module, or returns another in its place with the same parameter names. Between
the modules activations are replicated over the ranks of ``tp``, or with sequence parallelism
sharded along the sequence (``sequence``). ``overlap`` makes communication overlap products.

Letters of shapes: B sequences, S tokens of each on the ranks of ``tp`` together, s a tp rank's of
them (with sequence parallelism), H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops.models.parallelization.vocab_parallel_head import VocabParallelHead
from fusedops.nn import MLP, GatedMLP, MoE
from fusedops.parallel.tensor.layers import (
    ColumnLinear,
    ParallelGatedMLP,
    ParallelMLP,
    RowLinear,
    to_tensor_parallel,
)
from fusedops.parallel.tensor.replicated import allreduce_gradients, local_chunk
from fusedops.parallel.tensor.sequence import SequenceNorm
from fusedops.parallel.tensor.vocabulary import VocabularyEmbedding

_LOG = logging.getLogger("fusedops")


class ParallelStyle(Protocol):
    """How ``tp`` shards a module."""

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return the parallel form of a module: itself, changed, or another one."""


def apply_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Apply the styles of a plan to the modules they name; ``*`` matches any part of a name."""
    for pattern, style in plan.items():
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        for name in names:
            owner, _, child = name.rpartition(".")
            module = model.get_submodule(name)
            setattr(model.get_submodule(owner), child, style.apply(module, mesh))
        if names:
            _LOG.debug("parallelize: tp: %d modules %s: %s", len(names), pattern, style)


@dataclass(frozen=True)
class ColumnParallel:
    """Shard the outputs of a linear layer, whose input is in the tensor-parallel region.

    Attributes:
        heads: number of key and value heads, if a head must not be divided.
    """

    sequence: bool = False
    heads: int | None = None

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``ColumnLinear``."""
        return ColumnLinear.of(
            module, mesh, sequence=self.sequence, communicate=False, heads=self.heads
        )


@dataclass(frozen=True)
class RowParallel:
    """Shard the inputs of a linear layer, and reduce its output."""

    sequence: bool = False
    overlap: bool = False

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``RowLinear``."""
        return RowLinear.of(module, mesh, sequence=self.sequence, overlap=self.overlap)


@dataclass(frozen=True)
class Heads:
    """Shard the heads of attention: queries, keys and values share one communication."""

    sequence: bool = False

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return the attention with the heads of this rank and its input communicated."""
        group, ranks = mesh.get_group(), mesh.size()
        module.num_heads //= ranks
        module.num_kv_heads = max(1, module.num_kv_heads // ranks)
        module.first_head = mesh.get_local_rank() * module.num_heads

        def enter_region(module: nn.Module, args: Any) -> Any:
            x_BSH, context, query_input_BSH = args
            if query_input_BSH is not None:
                query_input_BSH = to_tensor_parallel(query_input_BSH, group, sequence=self.sequence)
            return (
                to_tensor_parallel(x_BSH, group, sequence=self.sequence),
                context,
                query_input_BSH,
            )

        module.register_forward_pre_hook(enter_region)
        return module


@dataclass(frozen=True)
class FeedForward:
    """Shard the hidden features of an MLP; experts are left to ``ep`` and to the partition."""

    sequence: bool = False
    overlap: bool = False
    recompute: bool = False

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``ParallelMLP`` or a ``ParallelGatedMLP``, or the experts as they are."""
        if isinstance(module, MoE):
            return module
        if isinstance(module, GatedMLP):
            overlap = self.overlap and module.gate_proj.bias is None
            return ParallelGatedMLP.of(module, mesh, sequence=self.sequence, overlap=overlap)
        assert isinstance(module, MLP)
        overlap = self.overlap and not self.recompute
        return ParallelMLP.of(module, mesh, sequence=self.sequence, overlap=overlap)


@dataclass(frozen=True)
class SharedNorm:
    """Sum the gradients of a norm over ranks that give it other tokens, or other heads."""

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``SequenceNorm``."""
        return module if isinstance(module, nn.Identity) else SequenceNorm.of(module, mesh)


@dataclass(frozen=True)
class SummedGradients:
    """Replicate a module over ranks that give it other tokens, and sum its gradients."""

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return the module itself."""
        allreduce_gradients(module, mesh)
        return module


@dataclass(frozen=True)
class PositionTable:
    """Replicate a table that is indexed by token, and look up this rank's tokens only."""

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return the table itself, with a hook that shards its indices."""
        allreduce_gradients(module, mesh)
        module.register_forward_pre_hook(partial(_shard_indices, mesh.get_group()))
        return module


def _shard_indices(group: dist.ProcessGroup, module: nn.Module, args: Any) -> Any:
    """Return the indices of this rank's tokens: ``[..., S]`` to ``[..., s]``."""
    return (local_chunk(args[0], group, -1),)


@dataclass(frozen=True)
class VocabEmbedding:
    """Shard the vocabulary of the embedding."""

    sequence: bool = False

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``VocabularyEmbedding``."""
        return VocabularyEmbedding.of(module, mesh, sequence=self.sequence)


@dataclass(frozen=True)
class VocabHead:
    """Shard the vocabulary of the head."""

    vocab_size: int
    sequence: bool = False

    def apply(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Return a ``VocabParallelHead``."""
        return VocabParallelHead.of(module, mesh, self.vocab_size, sequence=self.sequence)
