"""``MicroBatch``: a process's part of a micro-batch, as ``Transformer`` takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class MicroBatch(NamedTuple):
    """A process's part of a micro-batch, as ``Transformer`` takes it.

    All are ``[B, S / cp]``; positions, which are those in the whole sequence, may be ``[S / cp]``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    domains: torch.Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """Return what ``Transformer`` takes by name: all but tokens and labels."""
        return dict(zip(self._fields[2:], self[2:], strict=True))
