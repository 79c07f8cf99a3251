"""Checks of the arguments of module constructors, with the error messages of the ops."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks


def values_of(module: torch.nn.Module, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def shown(module: torch.nn.Module, *names: str) -> str:
    """Return arguments as ``extra_repr`` shows them; ``bias`` is whether there is one."""
    values = values_of(module, *names)
    if "bias" in values:
        values["bias"] = values["bias"] is not None
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def check_flags(module: str, **flags: Any) -> None:
    """Raise unless each of the named arguments is a bool."""
    for name, value in flags.items():
        checks.flag(module, name, value)


def check_sizes(module: str, **sizes: Any) -> None:
    """Raise unless each of the named arguments is a number of features; torch allows none."""
    for name, value in sizes.items():
        checks.integer(module, name, value, least=0)


def check_place(module: str, device: Any, dtype: Any, name: str = "dtype") -> None:
    """Raise unless parameters can be made on ``device`` in ``dtype``; ``None`` is torch's own."""
    if dtype is not None and dtype not in checks.FLOATING:
        got = checks.shown(dtype) if not isinstance(dtype, torch.dtype) else dtype
        raise TypeError(f"{module}: {name} must be None or a floating torch.dtype, got {got}")
    if device is None or isinstance(device, torch.device):
        return
    named = isinstance(device, (str, int)) and not isinstance(device, bool)
    if not named:
        expected = "None, a torch.device, or a name or number of one"
        raise TypeError(f"{module}: device must be {expected}, got {checks.type_name(device)}")
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:
            checks.fail(module, "device", "the name of a device", checks.shown(device))


def check_norm(module: str, normalized_shape: Any, eps: Any, **flags: Any) -> None:
    """Raise unless a norm can be made of these."""
    one = not isinstance(normalized_shape, (tuple, list))
    sizes = checks.sizes(
        module, "normalized_shape", (normalized_shape,) if one else normalized_shape
    )
    for size in sizes:
        if not 0 <= size < 2**63:
            checks.fail(module, "normalized_shape", "of sizes from 0", checks.shown(size))
    checks.number(module, "eps", eps)
    check_flags(module, **flags)
