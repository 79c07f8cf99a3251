"""One description per op, in a file of the op's name. See ``spec.py`` for what a spec says."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from fusedops.specs.spec import (
    BadInput,
    BenchCase,
    Depth,
    MultiTensorSpec,
    Sample,
    Spec,
    tensors_in,
)

__all__ = [
    "BadInput",
    "BenchCase",
    "Depth",
    "MultiTensorSpec",
    "Sample",
    "Spec",
    "all_specs",
    "multi_tensor_specs",
    "tensors_in",
]


@functools.cache
def all_specs() -> dict[str, Spec]:
    """Return op name -> spec, sorted by name: every module of this package that has a ``SPEC``."""
    return {spec.name: spec for spec in _specs() if isinstance(spec, Spec)}


@functools.cache
def multi_tensor_specs() -> dict[str, MultiTensorSpec]:
    """Return the same of the operators over lists of tensors."""
    return {spec.name: spec for spec in _specs() if isinstance(spec, MultiTensorSpec)}


def _specs() -> list[Any]:
    """Return what the modules of this package call ``SPEC``, by the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return [module.SPEC for module in modules if hasattr(module, "SPEC")]
