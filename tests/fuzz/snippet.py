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
    parts = [value(arg) for arg in args]
    parts += [f"{name}={value(kwarg)}" for name, kwarg in (kwargs or {}).items()]
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
    dtype = given.dtype
    gradient = ".requires_grad_()" if given.requires_grad else ""
    if given.is_nested:
        return "torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)"
    shape = list(given.shape)
    if given.layout == torch.sparse_coo:
        return f"torch.zeros({shape}, dtype={dtype}).to_sparse()"
    if given.is_quantized:
        return f"torch.quantize_per_tensor(torch.zeros({shape}), 0.1, 0, {dtype})"
    if given.is_meta:
        return f"torch.empty({shape}, dtype={dtype}, device='meta')"
    plain = given.detach()
    repeated = [d for d in range(plain.dim()) if plain.stride(d) == 0 and plain.shape[d] > 1]
    if repeated:
        for dim in repeated:
            plain = plain.narrow(dim, 0, 1)
        return f"{tensor(plain)}.expand({shape}){gradient}"
    if plain.is_contiguous():
        return values(plain) + gradient
    span = 1 + sum((n - 1) * s for n, s in zip(shape, plain.stride(), strict=True))
    memory = f"torch.empty({max(span, 0)}, dtype={dtype})"
    layout = f"as_strided({shape}, {list(plain.stride())})"
    return f"{memory}.{layout}.copy_({values(plain)}){gradient}"


def values(given: torch.Tensor) -> str:
    """Return code for a dense tensor like this one."""
    shape, dtype = list(given.shape), given.dtype
    drawn = dtype.is_complex or (dtype.is_floating_point and bool(given.double().isfinite().all()))
    if drawn:
        return f"torch.randn({shape}).to({dtype})"
    if given.numel() > MOST_VALUES:
        return f"torch.ones({shape}, dtype={dtype})"
    listed = str(given.reshape(-1).tolist())
    listed = listed.replace("nan", "float('nan')").replace("inf", "float('inf')")
    return f"torch.tensor({listed}, dtype={dtype}).reshape({shape})"
