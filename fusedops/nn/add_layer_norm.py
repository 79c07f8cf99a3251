"""``AddLayerNorm``: dropout, residual sum and layer normalisation in one pass."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops.nn.layer_norm import LayerNorm
from fusedops.ops.add_layer_norm import add_layer_norm


class AddLayerNorm(LayerNorm):
    """Add to the residual stream and normalise the sum.

    ``summed = residual + dropout(input); normed = layer_norm(summed) * weight + bias``

    Parameters, ``state_dict`` keys and initialisation are those of ``torch.nn.LayerNorm``, of
    which it is a subclass, so that weight decay rules and initialisers treat it as one.

    Args:
        normalized_shape: this and the following up to ``dtype`` as in :class:`LayerNorm`.
        dropout_p: probability with which an element of ``input`` is dropped in training.

    Raises:
        ValueError: ``dropout_p`` is outside [0, 1].

    Note:
        Numerics and backends are those of ``fusedops.add_layer_norm``.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.AddLayerNorm(3, eps=0.0)
        >>> normed, summed = norm(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[0.0, 1.0, 2.0]]))
        >>> normed.detach(), summed.detach()
        (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[1., 2., 3.]]))
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout_p: float = 0.0,
    ) -> None:
        checks.probability(type(self).__name__, "dropout_p", dropout_p)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.dropout_p = dropout_p

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, residual: torch.Tensor, *, seed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(normed, summed)``, each of the shape of ``residual``.

        ``seed`` is the seed of the dropout mask; by default two numbers from torch's generator.
        """
        norm = (self.normalized_shape, self.weight, self.bias, self.eps)
        drop: dict[str, Any] = {"dropout_p": self.dropout_p, "training": self.training}
        return add_layer_norm(input, residual, *norm, **drop, seed=seed)

    def extra_repr(self) -> str:
        """Return torch's line and the dropout probability."""
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"
