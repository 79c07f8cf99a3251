"""Seeds of all dropout calls of a forward: made once, from one seed, and passed to each call.

The random numbers of a call follow from the seed, its layer and its index in the layer, not from
the order of calls: pipeline stages, which run some of the layers for several micro-batches at the
same time, draw what one process draws, and so does a layer that is recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedops._core import philox
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
