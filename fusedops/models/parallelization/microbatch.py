"""``MicroBatch``: a process's part of a micro-batch, as ``Transformer`` takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MicroBatch(NamedTuple):
    """A process's part of a micro-batch, as ``Transformer`` takes it.

    Attributes:
        tokens: ``[B, S / cp]``.
        labels: ``[B, S / cp]``, or ``None``.
        positions: ``[S / cp]`` or ``[B, S / cp]``: of these tokens in their sequence.
        document_ids: ``[B, S / cp]``, or ``None``.
        domains: ``[B, S / cp]``, or ``None``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    domains: torch.Tensor | None = None
