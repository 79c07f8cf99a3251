"""Autocast of ops where the compiled library is not there: the twin of ``csrc/router.cpp``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def autocast_kernel(op: Any, rule: str, device: str, key: Any) -> Callable[..., Any]:
    """Return the kernel of ``op`` for the dispatch key of autocast on a type of device."""

    def eligible(arg: Any) -> bool:
        return (
            isinstance(arg, torch.Tensor)
            and arg.device.type == device
            and arg.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if rule == "norm" and "hf" in (arg for arg in args if isinstance(arg, str)):
                return op(*args)  # with this rounding a norm keeps the dtypes, as the models do
            if rule == "lower":
                target = torch.get_autocast_dtype(device)
            elif rule == "norm":
                target = torch.float32
            else:
                dtypes_given = (arg.dtype for arg in args if eligible(arg))
                target = functools.reduce(torch.promote_types, dtypes_given)
            return op(*(arg.to(target) if eligible(arg) else arg for arg in args))

    return kernel
