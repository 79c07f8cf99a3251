"""Python code that makes the arguments of a call again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

# Integers up to this many are written out; floating values are drawn anew where they are finite.
MOST_VALUES = 400


def call(function: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> str:
    """Return code that calls ``function`` with these arguments."""
    parts = [value(each) for each in args]
    parts += [f"{name}={value(each)}" for name, each in (kwargs or {}).items()]
    return "import torch, fusedops\n" + f"{function}(\n    " + ",\n    ".join(parts) + ",\n)"


def value(given: Any) -> str:
    """Return code for one argument."""
    if isinstance(given, torch.Tensor):
        return tensor(given)
    if isinstance(given, float) and (given != given or abs(given) == float("inf")):
        return f"float('{given}')"
    if isinstance(given, (list, tuple)):
        inner = ", ".join(map(value, given))
        if isinstance(given, list):
            return f"[{inner}]"
        name = "" if type(given) is tuple else type(given).__name__
        return f"{name}({inner}{',' if len(given) == 1 else ''})"
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        fields = ((each.name, getattr(given, each.name)) for each in dataclasses.fields(given))
        inner = ", ".join(f"{name}={value(each)}" for name, each in fields)
        return f"fusedops.{type(given).__name__}({inner})"
    return repr(given)


def tensor(given: torch.Tensor) -> str:
    """Return code for a tensor: its values where they matter, its layout where it is not dense."""
    shape, dtype = list(given.shape), given.dtype
    if given.device.type == "meta":
        return f"torch.empty({shape}, dtype={dtype}, device='meta')"
    plain = given.detach()
    finite = not dtype.is_floating_point or bool(plain.isfinite().all())
    if (dtype.is_floating_point and finite) or dtype.is_complex or plain.numel() > MOST_VALUES:
        random = "randn" if dtype.is_floating_point or dtype.is_complex else "ones"
        code = f"torch.{random}({shape}).to({dtype})"
    else:
        listed = str(plain.tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
        code = f"torch.tensor({listed}, dtype={dtype}).reshape({shape})"
    if not plain.is_contiguous():
        span = 1 + sum((n - 1) * s for n, s in zip(shape, plain.stride(), strict=True))
        code += (
            f".new_empty({max(span, 0)}).as_strided({shape}, {list(plain.stride())}).copy_({code})"
        )
        if any(s == 0 and n > 1 for n, s in zip(shape, plain.stride(), strict=True)):
            code = f"torch.zeros(1).to({dtype}).expand({shape})  # {code}"
    return code + (".requires_grad_()" if given.requires_grad else "")
