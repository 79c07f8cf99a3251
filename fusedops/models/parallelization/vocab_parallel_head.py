"""The head of a model whose vocabulary is sharded over the ranks of ``tp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops.models.embedding_and_head import Head
from fusedops.models.forward_context import ForwardContext
from fusedops.parallel.tensor.layers import distribute, local, to_tensor_parallel
from fusedops.parallel.tensor.vocabulary import (
    VocabParallelProjection,
    vocab_parallel_cross_entropy,
)


class VocabParallelHead(Head):
    """A ``Head`` whose ``weight`` and ``bias`` are ``Shard(0)``; made by ``VocabParallelHead.of``.

    Attributes:
        projection: computes the logits of this rank's shard of the vocabulary, and gathers them.
    """

    projection: VocabParallelProjection
    _group: Any
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
            parameter = getattr(head, name)
            if parameter is not None:
                parameter = distribute(
                    "parallelize", f"head.{name}", parameter, mesh, 0, uneven=True
                )
            self.register_parameter(name, parameter)
        self.projection = VocabParallelProjection(mesh.get_group(), vocab_size)
        self._group, self._sequence = mesh.get_group(), sequence
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
