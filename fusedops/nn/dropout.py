"""``Dropout``: torch's module, whose mask is drawn by a counter and never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.ops.bias_dropout_add import bias_dropout_add


class Dropout(nn.Module):
    """Drop elements in training and scale the others by ``1 / (1 - p)``.

    Args:
        p: probability with which an element is dropped.

    Attributes:
        seed_of_rows: a function of the input that returns the seed to draw from, ``None`` for one
            of torch's generator.

    Raises:
        ValueError: ``p`` is outside [0, 1].
        TypeError: ``p`` is no float.

    Note:
        As of ``fusedops.bias_dropout_add``; the numbers are not those of ``torch.nn.Dropout``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.Dropout(1.0)(torch.ones(2))
        tensor([0., 0.])
    """

    seed_of_rows: Callable[..., torch.Tensor] | None = None

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        checks.probability("Dropout", "p", p)
        self.p = p

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` with elements dropped in training, else ``input``."""
        checks.tensor("Dropout", "input", input)
        if not self.training or self.p == 0.0:
            return input
        seed = seed_for(self, self.p, input)
        return bias_dropout_add(input, None, torch.zeros_like(input), self.p, seed=seed)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


def seed_for(module: Any, p: float, input: torch.Tensor) -> torch.Tensor | None:
    """Return the seed that a module's dropout of ``input`` has been given, if it draws at all."""
    if module.seed_of_rows is None or not module.training or p == 0.0:
        return None
    return module.seed_of_rows(input)
