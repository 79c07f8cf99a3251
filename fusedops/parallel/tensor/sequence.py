"""Norms between the regions of sharded features, where the sequence is sharded over the ranks.

They communicate nothing in the forward. Their parameters are replicated and applied to other tokens
on each rank, so the gradients are parts of a sum: one all-reduce per norm sums those of weight and
bias together. The same holds for norms of queries and keys, whose heads are sharded: for them
``of`` is right without a sharded sequence too.

Reference: Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fusedops._core import checks, dtypes
from fusedops.nn import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from fusedops.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import ParallelLayer, distribute, local


def replicated_parameters(
    parameters: list[torch.Tensor | None], group: dist.ProcessGroup
) -> list[torch.Tensor | None]:
    """Return replicated parameters, for a forward on sharded tokens or heads.

    As the node ``copy_to`` does, with one all-reduce of all gradients, summed in float32 at least.
    """
    present = [parameter for parameter in parameters if parameter is not None]
    if group.size() == 1 or not present:
        return parameters
    results = iter(_ReplicatedParameters.apply(group, *present))
    return [None if parameter is None else next(results) for parameter in parameters]


class _ReplicatedParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parameters: torch.Tensor) -> Any:
        ctx.group = group
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # A parameter that no token of this rank used may have a gradient on other ranks.
        wide = dtypes.statistics_dtype(ctx.like[0][1])
        flat = [
            torch.zeros(shape.numel(), dtype=wide, device=device)
            if grad is None
            else grad.flatten().to(wide)
            for grad, (shape, _, device) in zip(grads, ctx.like, strict=True)
        ]
        summed = collectives.all_reduce(torch.cat(flat), ctx.group).wait()
        parts = zip(summed.split([part.numel() for part in flat]), ctx.like, strict=True)
        return None, *(part.view(shape).to(dtype) for part, (shape, dtype, _) in parts)


# Of each norm: its function, whether that takes a bias, and the attributes that are keywords.
_NORMS: dict[type, tuple[Callable[..., Any], bool, tuple[str, ...]]] = {
    LayerNorm: (layer_norm, True, ()),
    RMSNorm: (rms_norm, False, ("weight_offset", "rounding")),
    AddLayerNorm: (add_layer_norm, True, ("dropout_p", "training")),
    AddRMSNorm: (add_rms_norm, False, ("weight_offset", "rounding", "dropout_p", "training")),
}


class SequenceNorm(ParallelLayer):
    """A norm of tokens, or heads, that are split over the ranks.

    Made by ``SequenceNorm.of``. ``weight`` and ``bias`` are ``Replicate``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    kind: type  # of the plain norm

    @classmethod
    def of(
        cls, module: LayerNorm | RMSNorm | AddLayerNorm | AddRMSNorm, mesh: DeviceMesh
    ) -> SequenceNorm:
        """Return ``module`` with the gradients of its parameters summed over the ranks.

        Raises:
            TypeError: ``module`` is none of these norms of ``fusedops.nn``.
        """
        self = cls(mesh, sequence=True)
        op = cls.__name__
        if type(module) not in _NORMS:
            names = ", ".join(norm.__name__ for norm in _NORMS)
            expected = f"module must be one of fusedops.nn's {names}"
            raise TypeError(f"{op}: {expected}, got {checks.type_name(module)}")
        self.kind = type(module)
        for name in ("normalized_shape", "eps", *_NORMS[self.kind][2]):
            setattr(self, name, getattr(module, name))
        for name in ("weight", "bias"):
            parameter = distribute(op, name, getattr(module, name, None), mesh, None)
            self.register_parameter(name, parameter)
        return self.train(module.training)

    def forward(self, *inputs: torch.Tensor, **options: Any) -> Any:
        """Return what the plain norm returns of this rank's tokens or heads."""
        weight, bias = self.cached("norm", self._replicated)
        function, has_bias, names = _NORMS[self.kind]
        parameters = (weight, bias) if has_bias else (weight,)
        options |= {name: getattr(self, name) for name in names}
        return function(*inputs, self.normalized_shape, *parameters, self.eps, **options)

    def _replicated(self) -> list[torch.Tensor | None]:
        return replicated_parameters([local(self.weight), local(self.bias)], self.group)
