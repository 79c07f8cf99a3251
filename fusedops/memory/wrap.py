"""A wrapper around the ``forward`` of a module instance.

A hook would not do: a fused module stops doing the work of children that have hooks. A ``forward``
on the instance runs inside FSDP2's hooks, where weights are gathered. It is an object and no
closure, so that a copy of the model has wrappers of its own; patched modules know it by
``__wrapped__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

ForwardCall = Callable[..., Any]
Around = Callable[[ForwardCall, tuple[Any, ...], dict[str, Any]], Any]


class Wrapped:
    """Stands as ``module.forward`` and calls ``around`` with the forward that it found."""

    def __init__(self, module: nn.Module, around: Around) -> None:
        self.module = module
        self.around = around
        self.before = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.around(self.call, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped forward: that of the current class, which ``unpatch`` may change."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> ForwardCall:
        return self.before if self.before is not None else type(self.module).forward

    @property
    def __signature__(self) -> inspect.Signature:
        if self.before is not None:
            return inspect.signature(self.before)
        return inspect.signature(type(self.module).forward.__get__(self.module))


def wrap(module: nn.Module, around: Around) -> None:
    """Put ``around`` around the forward of a module."""
    module.forward = Wrapped(module, around)


def unwrap(module: nn.Module) -> None:
    """Take the outermost wrapper off."""
    wrapper = module.__dict__["forward"]
    assert isinstance(wrapper, Wrapped)
    if wrapper.before is None:
        del module.__dict__["forward"]
    else:
        module.forward = wrapper.before


def unsupported_reason(module: nn.Module) -> str | None:
    """Return why a patched module runs its original forward now; ``None`` for all others."""
    rule = getattr(type(module), "fused_rule", None)
    return rule.bypass_reason(module) if rule is not None else None
