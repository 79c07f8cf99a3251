"""``RMSNorm``: torch's module with the fused op as its forward."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import checks
from fusedops.nn._arguments import check_norm, check_place, shown
from fusedops.ops.rms_norm import ROUNDINGS, rms_norm


class RMSNorm(nn.RMSNorm):
    """Divide by the root mean square over the last dimensions; ``torch.nn.RMSNorm``, fused.

    ``y = x / sqrt(E[x^2] + eps) * (weight + weight_offset)``

    Constructor arguments, parameters, ``state_dict`` keys and initialisation are those of
    ``torch.nn.RMSNorm``, of which it is a subclass; additional arguments are keyword-only.

    Args:
        normalized_shape: sizes of the trailing dimensions, or the size of the last one.
        eps: added to the mean square; ``None``: as ``fusedops.rms_norm``.
        elementwise_affine: whether there is a weight.
        device: device of the weight.
        dtype: dtype of the weight.
        weight_offset: added to the weight, which starts at ``1 - weight_offset``; 1 for Gemma.
        rounding: ``"torch"`` or ``"hf"``, see ``fusedops.rms_norm``.

    Raises:
        ValueError: ``rounding`` is unknown, or the forward's input does not end in
            ``normalized_shape``.
        TypeError: the forward's input is no floating tensor of the weight's dtype.

    Note:
        Numerics and backends are those of ``fusedops.rms_norm``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).detach()
        tensor([[1., 1.]])
    """

    weight_offset = 0.0

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
    ) -> None:
        name = type(self).__name__
        checked_eps = 0.0 if eps is None else eps
        check_norm(name, normalized_shape, checked_eps, elementwise_affine=elementwise_affine)
        check_place(name, device, dtype)
        checks.finite(name, "weight_offset", weight_offset)
        checks.choice(name, "rounding", rounding, ROUNDINGS)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        self.rounding = rounding
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that rows are scaled by 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, ``[..., *normalized_shape]``."""
        norm = (self.normalized_shape, self.weight, self.eps)
        return rms_norm(input, *norm, weight_offset=self.weight_offset, rounding=self.rounding)

    def extra_repr(self) -> str:
        """Return torch's line and the additional arguments."""
        return f"{super().extra_repr()}, {shown(self, 'weight_offset', 'rounding')}"
