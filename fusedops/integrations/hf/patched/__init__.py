"""Modules of the patched classes that no table names, one for each file of originals.

``modeling_granite.GraniteMLP`` of transformers is replaced by a class of that name in
``fusedops.integrations.hf.patched.transformers.models.granite.modeling_granite``. These modules
have no files: importing one makes it, and reading a class of it makes the class.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


def module_of(original: type | FunctionType) -> str:
    """Return the name of the module for what ``original`` is replaced by; it is imported."""
    name = f"{__name__}.{original.__module__}"
    importlib.import_module(name)
    return name


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        source = module.__name__.removeprefix(f"{__name__}.")
        vars(module)["__builtins__"] = vars(builtins)  # code with these globals looks there

        def patched_class(name: str) -> Any:
            if not name.startswith("__"):
                original = getattr(importlib.import_module(source), name, None)
                # The rules make classes for this package.
                tables: Any = importlib.import_module("fusedops.integrations.hf.tables")
                rule = tables.rule_of_class(original) if isinstance(original, type) else None
                if rule is not None:
                    return rule.patched
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = patched_class  # type: ignore[method-assign]


sys.meta_path.append(_Finder())
