"""Modules that act on each token alone, where every rank has another part of the tokens.

Tables of positions, routers: each rank has all of their parameters, meets them with its own tokens,
and the gradients are added up (norms: ``parallel/tensor/sequence.py``). ``take_tokens`` and
``join_tokens`` lead whole activations, which all ranks have, into such a region and out of it;
``parallel/tensor/layers.py`` has the pair for activations that are parts of a sum.

Letters of shapes: B sequences, S tokens of each, s this rank's of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from fusedops.parallel.comm import collectives
from fusedops.parallel.tensor.layers import distribute, local
from fusedops.parallel.tensor.sequence import shared_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the gradients of a module's parameters be added up over ranks, in the backward.

    Args:
        module: whole on every rank, each of which calls it with other tokens. Its parameters
            become DTensors, ``Replicate``; names, hooks and ``state_dict`` stay.
        mesh: the ranks; of one dimension.

    Raises:
        TypeError: a parameter is a DTensor already.
    """
    group = mesh.get_group()
    for owner, name, parameter in list(parameters_of(module)):
        setattr(owner, name, distribute("sum_gradients", name, parameter, mesh, None))
    put_around(module, lambda each: shared_together([local(p) for p in each], group))


StandIn = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


def put_around(
    module: nn.Module, stand_in: StandIn, call: Callable[..., Any] | None = None
) -> None:
    """Let a module's forward read other tensors for its parameters.

    Args:
        module: whose forward it is.
        stand_in: what is read for all of its parameters; called once per forward.
        call: ``call(forward, *args, **kwargs)`` runs the module; calls it by default.
    """
    module.forward = Around(module, stand_in, call)


class Around:
    """Stands as ``module.forward``; an object and no closure, so that copies have their own."""

    def __init__(
        self,
        module: nn.Module,
        stand_in: StandIn,
        call: Callable[..., Any] | None,
    ) -> None:
        self.call = call
        self._module = module
        self._stand_in = stand_in
        self._is_held = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with nullcontext() if self._is_held else self.held():
            if self.call is not None:
                return self.call(self.plain, *args, **kwargs)
            return self.plain(*args, **kwargs)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let other tensors stand in once for all calls inside."""
        found = list(parameters_of(self._module))
        tensors = self._stand_in([each for *_, each in found])
        places = [(owner, name) for owner, name, _ in found]
        with standing_in(dict(zip(places, tensors, strict=True))):
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, inside of ``held``."""
        return type(self._module).forward(self._module, *args, **kwargs)


def parameters_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Return each parameter with the module that owns it and its name there."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter


@contextmanager
def standing_in(read: Mapping[tuple[nn.Module, str], torch.Tensor | None]) -> Iterator[None]:
    """Let attributes of modules be these tensors: an instance's own hide its parameters."""
    for (owner, name), tensor in read.items():
        owner.__dict__[name] = tensor
    try:
        yield
    finally:
        for owner, name in read:
            del owner.__dict__[name]


def part_of(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's part of a dimension, of a tensor that every rank has: a view."""
    return tensor.chunk(group.size(), dim)[group.rank()]


def take_tokens(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens ``[B, s, H]`` of what every rank has whole ``[B, S, H]``.

    Backwards the ranks' gradients are joined, so that each has the whole one.
    """
    return _Take.apply(whole, group) if group.size() > 1 else whole


def join_tokens(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' tokens ``[B, S, H]``; every rank's gradient of them must be the whole one.

    Backwards each rank takes its part of it.
    """
    return _Join.apply(part, group) if group.size() > 1 else part


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return part_of(whole, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return join_tokens(grads[0], ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return collectives.all_gather(part, group, dim=1, label="tokens").wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return take_tokens(grads[0], ctx.group), None
