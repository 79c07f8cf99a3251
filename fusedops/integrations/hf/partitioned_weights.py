"""Parameters of which DeepSpeed's ZeRO-3 keeps a part here, and the hooks that gather them.

Between two forwards such a parameter has no element, and its shape as ``ds_shape``. The engine's
dictionary of parameters gathers one that is read while another module runs, and from then on that
module's own hooks do, in the backward as well. So these hooks may be bypassed, as no others.
"""

from __future__ import annotations

from typing import Any

import torch

_ENGINE = "deepspeed.runtime.zero."
_HOOKS = (_ENGINE, "deepspeed.utils.nvtx")  # the latter wraps hooks to mark them in profiles


def unsharded_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, also where only a part of it is here."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def gathers_on_access(module: Any) -> bool:
    """Return whether reading a parameter of ``module`` gathers it: the engine has taken it over.

    In code that is being compiled it does not: there the hooks must run.
    """
    if torch.compiler.is_compiling():
        return False
    return type(module._parameters).__module__.startswith(_ENGINE)


def only_gather(module: Any) -> bool:
    """Return whether all hooks on ``module`` are those by which ZeRO-3 gathers its parameters."""
    if not gathers_on_access(module):
        return False
    forward = (module._forward_hooks, module._forward_pre_hooks)
    tables = (*forward, module._backward_hooks, module._backward_pre_hooks)
    hooks = (hook for table in tables for hook in table.values())
    return all(str(getattr(hook, "__module__", None)).startswith(_HOOKS) for hook in hooks)
