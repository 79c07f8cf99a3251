"""What all dropout of a forward draws from: made once, from one seed, and given to each call.

A call's numbers follow from the seed, its layer and its place in the layer, not from the order in
which calls are made: stages of a pipeline, which have some of the layers and other micro-batches
at the same time, draw what one process does, and so does a layer that is run again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedops._core import philox
from fusedops.parallel.dropout import Place

# Calls of a layer: its attention's scores, what attention and feed-forward part add.
SCORES, ATTENTION, FEED_FORWARD = range(3)
_CALLS = 3


class Draws(NamedTuple):
    """Seeds with the places of a process's elements, a line for each call.

    Attributes:
        rows: for activations.
        scores: for attention, whose cores know which of the scores they compute.
    """

    rows: torch.Tensor
    scores: torch.Tensor

    def of_embedding(self) -> torch.Tensor:
        """Return the seed of what enters the first layer."""
        return self.rows[0]

    def of_rows(self, layer: int, call: int) -> torch.Tensor:
        """Return the seed of a branch of a layer."""
        return self.rows[1 + _CALLS * layer + call]

    def of_scores(self, layer: int) -> torch.Tensor:
        """Return the seed of a layer's attention."""
        return self.scores[1 + _CALLS * layer + SCORES]


def draws(
    seed: torch.Tensor,
    layers: int,
    place: Place,
    shape: tuple[int, int],
    *,
    heads: int,
    features: int,
    first: int | None = None,
) -> Draws:
    """Return the seeds of a forward.

    Args:
        seed: ``[2]``, the same on all processes.
        layers: of the whole model.
        place: of this process.
        shape: sequences, and tokens of each that enter the model here.
        heads: of attention, of all processes.
        features: of the residual stream.
        first: how many sequences come before these in the whole batch; by default those of other
            processes.
    """
    calls = 1 + _CALLS * layers
    numbers = torch.arange(calls, device=seed.device)
    seeds = torch.stack((seed[0].expand(calls), seed[1] + numbers), 1)
    if place == Place() and not first:
        return Draws(seeds, seeds)
    sequences, tokens = shape
    first = place.batch_part * sequences if first is None else first
    rows = place.rows(first, tokens // place.sequence_parts, features)
    scores = place.scores(first, heads // place.head_parts, tokens * place.context_parts)
    return Draws(philox.placed(seeds, rows), philox.placed(seeds, scores))


def behind(drawn: Draws, sequences: int, *, tokens: int, heads: int, features: int) -> Draws:
    """Return the seeds of a forward's last sequences.

    Args:
        drawn: of all of its sequences.
        sequences: how many come before the last ones.
        tokens: of a sequence here.
        heads: of attention, of all processes.
        features: of the residual stream.
    """
    rows, scores = drawn
    if rows.shape[1] == 2:  # of a batch that is whole here
        place = Place()
        return Draws(
            philox.placed(rows, place.rows(sequences, tokens, features)),
            philox.placed(scores, place.scores(sequences, heads, tokens)),
        )
    rows, scores = rows.clone(), scores.clone()
    rows[:, 5:] += sequences * rows[:, 3:4]
    scores[:, 2] += sequences * scores[:, 3]
    return Draws(rows, scores)
