"""Dropout that does not depend on the layout: each element draws by its place in the whole batch.

One process would drop elements of ``[B, S, H]`` and scores of ``[B, N, S, S]`` by their linear
indices there, from one seed a call. A rank that has some of the sequences, a part of each sequence,
or some of the heads draws the same numbers when its seed says where its elements stand
(``_core/philox.py``): nothing is communicated, stored or drawn twice.

All ranks must draw the same seeds: the same state of torch's generator and the same calls. Parts of
a sequence are consecutive: those of balanced context parallelism are not, and have no place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusedops._core import checks, philox


@dataclass(frozen=True)
class Place:
    """Which part a rank has, of parts of the same size.

    Attributes:
        batch_part: of the sequences: the rank among those that have others.
        sequence_part: of the tokens of each sequence.
        sequence_parts: how many parts a sequence has.
        head_part: of the heads of attention.
        head_parts: how many parts those have.

    Raises:
        ValueError: a part is not below the number of parts.
        TypeError: one is no int.

    Example:
        >>> import torch
        >>> from fusedops.parallel.dropout import Place
        >>> Place(sequence_part=1, sequence_parts=2).of_rows(torch.ones(2, 3, 8))[2:]
        tensor([24, 24, 48])
    """

    batch_part: int = 0
    sequence_part: int = 0
    sequence_parts: int = 1
    head_part: int = 0
    head_parts: int = 1

    def __post_init__(self) -> None:
        checks.integer("Place", "batch_part", self.batch_part, least=0)
        for what in ("sequence", "head"):
            part, parts = getattr(self, f"{what}_part"), getattr(self, f"{what}_parts")
            checks.integer("Place", f"{what}_parts", parts, least=1)
            checks.integer("Place", f"{what}_part", part, least=0)
            if part >= parts:
                checks.fail("Place", f"{what}_part", f"below {what}_parts, {parts}", part)

    def of_rows(self, input: torch.Tensor) -> torch.Tensor:
        """Return a new seed for dropout of activations ``[B, s, H]``.

        Raises:
            ValueError: they are not of three dims.
        """
        if input.dim() != 3:
            checks.fail("Place", "input", "[sequences, tokens, features]", list(input.shape))
        return self._seed(input, self.sequence_part, self.sequence_parts)

    def of_scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return a new seed for dropout in attention of ``[B, n, S, D]``, the heads here.

        Raises:
            ValueError: they are not of four dims.
        """
        if query.dim() != 4 or key.dim() != 4:
            wanted = "[sequences, heads, tokens, features]"
            checks.fail("Place", "query and key", wanted, [list(query.shape), list(key.shape)])
        scores = query[..., :1].expand(*query.shape[:3], key.shape[2])
        return self._seed(scores, self.head_part, self.head_parts)

    def _seed(self, like: torch.Tensor, part: int, parts: int) -> torch.Tensor:
        """Return a seed for ``like``, whose second dim is one of ``parts`` parts."""
        sequences, run = like.shape[0], like.shape[1:].numel()
        stride = parts * run
        base = self.batch_part * sequences * stride + part * run
        return philox.placed(philox.new_seed(like.device), base, max(run, 1), stride)


def place_dropout(module: nn.Module, place: Place) -> nn.Module:
    """Let all dropout inside ``module`` draw by place; returns ``module``.

    Modules with dropout ask a function for its seed where they have one: ``seed_of_rows(input)``
    (``fusedops.nn``'s ``Dropout``, ``AddLayerNorm`` and ``AddRMSNorm``) or
    ``seed_of_scores(query, key)``. Torch's own dropout does not, and stays as it is.
    """
    each: Any
    for each in module.modules():
        if hasattr(each, "seed_of_rows"):
            each.seed_of_rows = place.of_rows
        if hasattr(each, "seed_of_scores"):
            each.seed_of_scores = place.of_scores
    return module
