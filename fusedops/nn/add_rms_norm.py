"""``AddRMSNorm``: dropout, residual sum and root-mean-square normalisation in one pass."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops.nn.rms_norm import RMSNorm
from fusedops.ops.add_rms_norm import add_rms_norm


class AddRMSNorm(RMSNorm):
    """Add to the residual stream and divide the sum by its root mean square.

    ``summed = residual + dropout(input); normed = rms_norm(summed) * (weight + weight_offset)``

    Parameters, ``state_dict`` keys and initialisation are those of ``torch.nn.RMSNorm``, of which
    it is a subclass, so that weight decay rules and initialisers treat it as one.

    Args:
        normalized_shape: this and the following up to ``rounding`` as in :class:`RMSNorm`.
        dropout_p: probability with which an element of ``input`` is dropped in training.

    Raises:
        ValueError: ``dropout_p`` is outside [0, 1], or ``rounding`` is unknown.

    Note:
        Numerics and backends are those of ``fusedops.add_rms_norm``.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.AddRMSNorm(2, eps=0.0)
        >>> normed, summed = norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]))
        >>> normed.detach(), summed.detach()
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: str = "torch",
        dropout_p: float = 0.0,
    ) -> None:
        checks.probability(type(self).__name__, "dropout_p", dropout_p)
        options: dict[str, Any] = {"weight_offset": weight_offset, "rounding": rounding}
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self.dropout_p = dropout_p

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, residual: torch.Tensor, *, seed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(normed, summed)``, each of the shape of ``residual``.

        ``seed`` is the seed of the dropout mask; by default two numbers from torch's generator.
        """
        norm = (self.normalized_shape, self.weight, self.eps)
        options: dict[str, Any] = {"weight_offset": self.weight_offset, "rounding": self.rounding}
        options |= {"dropout_p": self.dropout_p, "training": self.training, "seed": seed}
        return add_rms_norm(input, residual, *norm, **options)

    def extra_repr(self) -> str:
        """Return the line of ``RMSNorm`` and the dropout probability."""
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"
