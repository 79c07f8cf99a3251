"""One description per op, in a file of the op's name. See ``spec.py`` for what a spec says."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from fusedops.specs.spec import BadInput, BenchCase, Depth, Sample, Spec, tensors_in

__all__ = ["BadInput", "BenchCase", "Depth", "Sample", "Spec", "all_specs", "tensors_in"]


@functools.cache
def all_specs() -> dict[str, Spec]:
    """Return op name -> spec, sorted by name: every module of this package that has a ``SPEC``."""
    specs = {}
    for module in pkgutil.iter_modules(__path__):
        spec = getattr(importlib.import_module(f"{__name__}.{module.name}"), "SPEC", None)
        if isinstance(spec, Spec):
            specs[spec.name] = spec
    return dict(sorted(specs.items()))
