"""``ForwardContext``: what all layers of a forward need in addition to the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusedops._core import philox
from fusedops.models.attention_core import Documents, attend
from fusedops.models.config import TransformerConfig
from fusedops.models.dropout_seeds import DropoutSeeds, call_index, call_seeds, with_offsets


class CachedAttention(Protocol):
    """Keys and values of earlier tokens, as generation keeps them."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Append keys and values of a layer; attend all of them. Arguments as of ``attend``."""


class BatchPartition:
    """Which part of a batch, of its sequences and of the heads this process computes: all of it.

    ``parallelize`` gives a model the one of its process.
    """

    # Ranks whose tokens count in the auxiliary loss of a router; ``None``: those of this process
    router_group: Any = None

    def new_seed(self, device: torch.device) -> torch.Tensor:
        """Draw a seed of dropout, int64 ``[2]``, the same on all ranks that run the forward."""
        return philox.new_seed(device)

    def attend(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        """Attend the tokens of the whole sequence; arguments as of ``attention_core.attend``."""
        return attend(*tensors, **options)

    def shard_tokens(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the tokens that experts on this process compute."""
        return x_BSH

    def shard_ids(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return the ids of the tokens that experts on this process compute."""
        return ids_BS

    def gather_tokens(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return all tokens, of the shards that ``shard_tokens`` made."""
        return x_BSH

    def dropout_seeds(
        self,
        seed: torch.Tensor,
        shape: torch.Size | tuple[int, int],
        first_sequence: int | None,
        config: TransformerConfig,
    ) -> DropoutSeeds:
        """Return the seeds of a forward over tokens of a shape.

        ``seed`` is int64 ``[2]``, the same on all processes. ``first_sequence`` is the number of
        sequences of the batch before these; ``None``: those of the data parallel ranks before this.
        """
        seeds = call_seeds(seed, config.num_layers)
        if not first_sequence:
            return DropoutSeeds(seeds, seeds)
        return with_offsets(seeds, first_sequence, shape[1], config)


@dataclass(frozen=True)
class ForwardContext:
    """What all layers need beyond the hidden states; ``Transformer.make_context`` makes it."""

    positions: torch.Tensor  # of the tokens in their sequence, ``[S]`` or ``[B, S]``
    # Cosines and sines, ``[S, D]`` or ``[B, S, D]`` each, or ``None``
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    # Which tokens may attend each other; ``None``: all of a sequence
    documents: Documents | None = None
    token_types: torch.Tensor | None = None  # BERT's segments, ``[B, S]``, or ``None``: 0
    # The ids ``[B, S]``, for routers that hash them, else ``None``
    tokens: torch.Tensor | None = None
    domains: torch.Tensor | None = None  # of the tokens, ``[B, S]``, or ``None``
    dropout_seeds: DropoutSeeds | None = None  # of all dropout calls; ``None``: nothing is dropped
    partition: BatchPartition = BatchPartition()  # which part of the batch this process computes
    # Attention over queries, keys and values, called as ``attention_core.attend``; ``None``: that
    # of the partition
    attend: Callable[..., torch.Tensor] | None = None
    # Keys and values of earlier tokens, which are attended instead
    kv_cache: CachedAttention | None = None
    # Indices of the tokens whose logits are computed, ``[R]``; ``None``: all
    logits_to_keep: torch.Tensor | None = None
    # Whether every rank of ``tp`` gets the logits of the whole vocabulary, not of its own shard
    # alone
    gather_logits: bool = True
    dropless: bool = False  # whether experts take all tokens, whatever their ``capacity_factor``

    def embedding_seed(self) -> torch.Tensor | None:
        """Return the dropout seed of the input of the first layer."""
        return None if self.dropout_seeds is None else self.dropout_seeds.rows[0]

    def branch_seed(self, layer: int, call: int) -> torch.Tensor | None:
        """Return the dropout seed of a branch of a layer."""
        return (
            None if self.dropout_seeds is None else self.dropout_seeds.rows[call_index(layer, call)]
        )
