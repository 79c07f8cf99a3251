"""``LayerNorm``: torch's module with the fused op as its forward."""

from __future__ import annotations

import torch
from torch import nn

from fusedops.nn._arguments import check_norm, check_place
from fusedops.ops.layer_norm import layer_norm


class LayerNorm(nn.LayerNorm):
    """Normalise over the last dimensions; ``torch.nn.LayerNorm`` with the fused op.

    ``y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias``

    Constructor arguments, parameters, ``state_dict`` keys and initialisation are those of
    ``torch.nn.LayerNorm``, of which it is a subclass: optimizers, initialisers and wrapping
    policies that look for layer norms by type find it.

    Args:
        normalized_shape: sizes of the trailing dimensions, or the size of the last one.
        eps: added to the variance.
        elementwise_affine: whether there is a weight (and a bias).
        bias: whether there is a bias; only read with ``elementwise_affine``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a size is negative, or the forward's input does not end in
            ``normalized_shape``.
        TypeError: an argument has a wrong type, or the forward's input is no floating tensor of the
            parameters' dtype.

    Note:
        Numerics and backends are those of ``fusedops.layer_norm``.

    Example:
        >>> import torch, fusedops
        >>> fusedops.nn.LayerNorm(3, eps=0.0)(torch.tensor([[1.0, 2.0, 3.0]])).detach()
        tensor([[-1.2247,  0.0000,  1.2247]])
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_norm(name, normalized_shape, eps, elementwise_affine=elementwise_affine, bias=bias)
        check_place(name, device, dtype)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, ``[..., *normalized_shape]``."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
