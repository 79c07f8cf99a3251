"""``ForwardContext``: what all layers of a forward need in addition to the hidden states.

The seeds of all dropout calls of a forward are made once, from one seed. The random numbers of a
call follow from the seed, its layer and its index in the layer, not from the order of calls:
pipeline stages, which run some of the layers for several micro-batches at the same time, draw what
one process draws, and so does a layer that is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fusedops._core import philox
from fusedops.models.attention_core import Documents, attend
from fusedops.models.config import TransformerConfig

# Dropout calls of a layer: attention scores, then the branch of attention and of feed-forward.
SCORES, ATTENTION, FEED_FORWARD = range(3)
_CALLS = 3


class DropoutSeeds(NamedTuple):
    """Seeds with the offsets of a process's elements in the whole batch, a row for each call."""

    rows: torch.Tensor  # for activations, int64 ``[calls, n]``
    scores: torch.Tensor  # for attention scores, int64 ``[calls, n]``


def call_index(layer: int, call: int) -> int:
    """Return the row of a dropout call of a layer; row 0 is the input of the first layer."""
    return 1 + _CALLS * layer + call


def call_seeds(seed: torch.Tensor, num_layers: int) -> torch.Tensor:
    """Return a seed ``[2]`` as one for each dropout call of a forward, ``[calls, 2]``."""
    calls = 1 + _CALLS * num_layers
    numbers = torch.arange(calls, device=seed.device)
    return torch.stack((seed[0].expand(calls), seed[1] + numbers), 1)


def with_offsets(
    seeds: torch.Tensor, first: int, tokens: int, config: TransformerConfig
) -> DropoutSeeds:
    """Return seeds for the sequences from ``first`` on, with all tokens and heads here."""
    heads, features = config.num_heads, config.hidden_size
    size, square = (tokens or 1) * max(1, features), tokens * tokens
    rows = size, tokens * features, size, first * tokens * features
    scores = first * heads * square, heads * square, square
    return DropoutSeeds(philox.placed(seeds, rows), philox.placed(seeds, scores))


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
    # Keys and values of earlier tokens, which are attended instead by ``kv_cache.attend(layer,
    # query, key, value, **options)``
    kv_cache: Any = None
    # Indices of the tokens whose logits are computed, ``[R]``; ``None``: all
    logits_to_keep: torch.Tensor | None = None
    # Whether every rank of ``tp`` gets the logits of the whole vocabulary, not of its own shard
    # alone
    gather_logits: bool = True
    dropless: bool = False  # whether experts take all tokens, whatever their ``capacity_factor``

    def attention_of(self, layer: int) -> Callable[..., torch.Tensor]:
        """Return the attention function of a layer; called as ``attention_core.attend``."""
        if self.kv_cache is not None:
            return partial(self.kv_cache.attend, layer)
        return self.attend or self.partition.attend

    def embedding_seed(self) -> torch.Tensor | None:
        """Return the dropout seed of the input of the first layer."""
        return None if self.dropout_seeds is None else self.dropout_seeds.rows[0]

    def branch_seed(self, layer: int, call: int) -> torch.Tensor | None:
        """Return the dropout seed of a branch of a layer."""
        seeds = self.dropout_seeds
        return None if seeds is None else seeds.rows[call_index(layer, call)]

    def score_seed(self, layer: int) -> torch.Tensor | None:
        """Return the dropout seed of the attention scores of a layer."""
        seeds = self.dropout_seeds
        return None if seeds is None else seeds.scores[call_index(layer, SCORES)]
