"""The arguments of the registered MoE ops whose reference, fake and kernels all take the same ones.

Without Triton, so that ``ops`` can import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PackArguments(NamedTuple):
    """The arguments of ``fusedops::moe_pack``, in the order of its schema."""

    input: torch.Tensor
    probs: torch.Tensor
    expert_ids: torch.Tensor | None
    row_index: torch.Tensor | None  # the schema's index, which is a method of tuples
    num_rows: torch.Tensor | None
    span: int
    quantized: bool
    layout: Sequence[int]

    @property
    def rows(self) -> int:
        """How many rows are packed."""
        return self.input.shape[0] if self.row_index is None else self.row_index.shape[0]


class RouteOptions(NamedTuple):
    """The arguments of ``fusedops::moe_route`` after its tensors."""

    top_k: int
    score: str
    normalize: bool
    scaling: float
    num_groups: int
    topk_groups: int
    group_score: str
    jitter: float
    capacity: int
    drop_policy: str


class RouterLossArguments(NamedTuple):
    """The arguments of ``fusedops::moe_router_loss``, in the order of its schema."""

    logits: torch.Tensor
    weights: torch.Tensor | None
    z_weight: torch.Tensor | None
    mask: torch.Tensor | None
    score: str
