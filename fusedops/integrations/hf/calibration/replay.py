"""Children that a module calls, in the form of what they gave when they ran once.

A layer that is timed as a whole is mostly the matrix products of its children, which are the same
on both sides and are measured on their own: what the layer itself does would be lost in their
noise. So each child is run once, and its outputs stand for it from then on. The graph stays
connected: a replayed call hands gradients of the right shapes to what it was called with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def called(module: nn.Module, inside: set[nn.Module]) -> list[nn.Module]:
    """Return the uppermost modules below ``module`` that are not among those ``inside`` it."""
    modules: list[nn.Module] = []
    for child in module.children():
        if child in inside:
            continue
        if type(child).forward is nn.Module.forward:  # a container
            modules += called(child, inside)
        else:
            modules.append(child)
    return modules


class Recording:
    """The outputs of some modules, call by call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._calls: dict[nn.Module, list[_Call]] = {module: [] for module in modules}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the modules give inside the block."""
        hooks = []
        for module, calls in self._calls.items():
            calls.clear()
            hooks.append(module.register_forward_hook(_keeps_in(calls)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the modules give that again inside the block, in the same order, without running."""
        for module, calls in self._calls.items():
            if calls:
                module.__dict__["forward"] = _replays(calls)
        try:
            yield
        finally:
            for module in self._calls:
                module.__dict__.pop("forward", None)


class _Call:
    """The outputs of one call, and gradients for what it was called with."""

    def __init__(self, output: Any) -> None:
        self.leaves, self.spec = tree_flatten(output)
        self.tensors = [leaf.detach() for leaf in self.leaves if _differs(leaf)]
        self.grads: list[torch.Tensor] = []

    def grads_for(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a gradient for each input, made when they were first seen."""
        if [grad.shape for grad in self.grads] != [input.shape for input in inputs]:
            self.grads = [torch.randn_like(input) for input in inputs]
        return self.grads


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.grads = call.grads_for(inputs)
        return tuple(tensor.detach() for tensor in call.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.grads


def _keeps_in(calls: list[_Call]) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(_Call(output))

    return keep


def _replays(calls: list[_Call]) -> Callable[..., Any]:
    position = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal position
        call = calls[position % len(calls)]
        position += 1
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if _differs(leaf)]
        replayed = iter(_Replay.apply(call, *inputs))
        leaves = [next(replayed) if _differs(leaf) else leaf for leaf in call.leaves]
        return tree_unflatten(leaves, call.spec)

    return forward


def _differs(value: Any) -> bool:
    """Return whether ``value`` may have a gradient."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
