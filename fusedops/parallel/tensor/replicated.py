"""Replicated modules that act on each token or head alone, where every rank has other ones.

Norms, position tables and routers: each rank has all of their parameters, applies them to its own
tokens, and one all-reduce per module sums the gradients. ``scatter_tokens`` and ``gather_tokens``
lead activations that all ranks have into such a region and out of it; ``layers.py`` has the pair
for activations that are parts of a sum.

Shape suffixes: B sequences, S tokens of each, s this rank's of them, H hidden size.

Reference: Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops._core import dtypes
from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import communicate, distribute, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def allreduce_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a replicated module's parameters over ranks, in the backward.

    Each rank calls it with other tokens, or other heads. Its parameters become DTensors,
    ``Replicate``; names, hooks and ``state_dict`` stay.

    Raises:
        TypeError: a parameter is a DTensor already.
    """
    group, named = mesh.get_group(), list(parameters_of(module))
    for owner, name, parameter in named:
        setattr(owner, name, distribute("allreduce_gradients", name, parameter, mesh, None))
    if not named:
        return
    module.forward = ParameterSubstitution(
        module, lambda parameters: _ReplicatedParameters.apply(group, *map(local, parameters))
    )


class _ReplicatedParameters(torch.autograd.Function):
    """The node ``copy_to`` of several parameters: gradients are summed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *parameters: torch.Tensor) -> Any:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # Zeros of a parameter that no token of this rank used: it may have a gradient elsewhere.
        wide = dtypes.statistics_dtype(grads[0].dtype)
        flat = torch.cat([grad.flatten().to(wide) for grad in grads])
        summed = collectives.all_reduce(flat, ctx.group).wait()
        parts = zip(summed.split([grad.numel() for grad in grads]), grads, strict=True)
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in parts)


@dataclass(eq=False)
class ParameterSubstitution:
    """A module's ``forward`` that reads other tensors in place of the module's parameters.

    It is an object and no closure, so that a copy of the module gets its own.
    ``torch.func.functional_call`` does not serve: it calls the module with its hooks, and this is
    what such a call runs as ``forward``.
    """

    module: nn.Module
    # Returns the tensors for all parameters; called once per forward.
    make: Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]
    # ``call(forward, *args, **kwargs)`` runs the module; ``None`` calls ``forward``.
    call: Callable[..., Any] | None = None
    _tensors: dict[Any, Any] | None = field(default=None, init=False)  # of calls that share them

    def __post_init__(self) -> None:
        # Found there by micro-batch overlap, which gives the module another ``forward``.
        self.module.__dict__["substitution"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self.reuse_parameters() if self._tensors is None else nullcontext():
            if self.call is not None:
                return self.call(self.plain, *args, **kwargs)
            return self.plain(*args, **kwargs)

    @contextmanager
    def reuse_parameters(self) -> Iterator[None]:
        """Make the tensors once, in the first of all calls inside."""
        self._tensors = {}
        try:
            yield
        finally:
            self._tensors = None

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, inside of ``reuse_parameters``."""
        if not self._tensors:
            parameters = list(parameters_of(self.module))
            tensors = self.make([parameter for *_, parameter in parameters])
            names = [(owner, name) for owner, name, _ in parameters]
            self._tensors = dict(zip(names, tensors, strict=True))
        with substituted(self._tensors):
            return type(self.module).forward(self.module, *args, **kwargs)


def parameters_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Return each parameter with the module that owns it and its name there."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter


@contextmanager
def substituted(tensors: Mapping[tuple[nn.Module, str], torch.Tensor | None]) -> Iterator[None]:
    """Set attributes of modules to tensors; an instance attribute hides a parameter of its name."""
    for (owner, name), tensor in tensors.items():
        owner.__dict__[name] = tensor
    try:
        yield
    finally:
        for owner, name in tensors:
            del owner.__dict__[name]


def local_chunk(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's chunk of a tensor that every rank has: a view."""
    return tensor.chunk(group.size(), dim)[group.rank()]


def scatter_tokens(replicated: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens ``[B, s, H]`` of a replicated ``[B, S, H]``; gathers gradients."""
    return communicate("scatter_tokens", replicated, group, 1)


def gather_tokens(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' tokens ``[B, S, H]``; their gradient must be the same on every rank."""
    return communicate("gather_tokens", shard, group, 1)
