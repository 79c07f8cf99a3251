"""``Dropout``: torch's module, with a mask that is drawn by a counter and never stored."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import checks, philox
from fusedops.ops.bias_dropout_add import bias_dropout_add


class Dropout(nn.Module):
    """Drop elements in training and scale the others by ``1 / (1 - p)``.

    Args:
        p: probability with which an element is dropped.

    Raises:
        ValueError: ``p`` is outside [0, 1].
        TypeError: ``p`` is no float.

    Note:
        Numerics are those of ``fusedops.bias_dropout_add``; the random numbers differ from those of
        ``torch.nn.Dropout``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.Dropout(1.0)(torch.ones(2))
        tensor([0., 0.])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        checks.probability("Dropout", "p", p)
        self.p = p

    def forward(self, input: torch.Tensor, *, seed: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``input`` with elements dropped in training, else ``input``.

        ``seed`` is the seed of the dropout mask; by default two numbers from torch's generator.
        """
        checks.tensor("Dropout", "input", input)
        if seed is not None:
            philox.check_seed("Dropout", seed, input.device)
        if not self.training or self.p == 0.0:
            return input
        return bias_dropout_add(input, None, torch.zeros_like(input), self.p, seed=seed)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"
