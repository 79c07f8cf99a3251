"""Megatron's norms on the fused ops, with Megatron's constructor."""

from __future__ import annotations

from typing import Any

import torch

from fusedops import nn as fused
from fusedops._core.checks import UnsupportedError
from fusedops.ops.layer_norm import layer_norm


class LayerNorm(fused.LayerNorm):
    """``fusedops.nn.LayerNorm`` whose weight may be kept minus one (``zero_centered``)."""

    zero_centered = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)


class Norm:
    """Build the norm that ``config.normalization`` names, as Megatron's norm classes do.

    The parameters are ``weight`` (and ``bias``), marked with ``sequence_parallel`` as Megatron
    marks its own: their gradients are summed over the tensor-parallel group.

    Args:
        config: a ``TransformerConfig``.
        hidden_size: size of the last dimension.
        eps: added to the variance or the mean square.
        **ignored: what other norms of Megatron take; the configuration says it too.

    Raises:
        UnsupportedError: ``config.normalization`` is neither ``"LayerNorm"`` nor ``"RMSNorm"``.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> Any:
        """Return a ``LayerNorm`` or a ``fusedops.nn.RMSNorm``."""
        centered = bool(config.layernorm_zero_centered_gamma)
        norm: Any
        if config.normalization == "RMSNorm":
            norm = fused.RMSNorm(hidden_size, eps, weight_offset=float(centered))
        elif config.normalization == "LayerNorm":
            norm = LayerNorm(hidden_size, eps)
            norm.zero_centered = centered
            if centered:
                torch.nn.init.zeros_(norm.weight)
        else:
            raise UnsupportedError(
                f"megatron: normalization {config.normalization!r} has no fused norm; "
                "'LayerNorm' and 'RMSNorm' have"
            )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
