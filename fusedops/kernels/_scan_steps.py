"""The steps of state space models in differentiable torch, for ops and launchers.

Imports no Triton.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from fusedops._core import dtypes
from fusedops.kernels._arguments import StateSpaceArguments

# ``torch.nn.functional.softplus`` is the identity above it.
_SOFTPLUS_LIMIT = 20.0
_ALL = slice(None)


def steps(call: StateSpaceArguments, tokens: slice = _ALL) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``dt + dt_bias`` and the steps of some tokens, in the dtype of statistics."""
    raw = call.dt[:, tokens].to(dtypes.statistics_dtype(call.input.dtype))
    if call.dt_bias is not None:
        raw = raw + call.dt_bias
    step = functional.softplus(raw) if call.dt_softplus else raw
    return raw, step.clamp(call.dt_min, call.dt_max)


def steps_backward(
    call: StateSpaceArguments, raw: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of ``dt + dt_bias`` from that of the steps."""
    step = functional.softplus(raw) if call.dt_softplus else raw
    passes = (step >= call.dt_min) & (step <= call.dt_max)
    grad = torch.where(passes, grad, torch.zeros_like(grad))
    if not call.dt_softplus:
        return grad
    slope = torch.sigmoid(raw)
    return grad * torch.where(raw > _SOFTPLUS_LIMIT, torch.ones_like(slope), slope)
