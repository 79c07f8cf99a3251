"""Whether a decorator only accepts the former names of arguments, as transformers has one."""

from __future__ import annotations

from typing import Any

_DECORATORS = ("transformers.utils.deprecation",)  # it changes keywords and nothing else


def only_renames(function: Any) -> bool:
    """Return whether ``function`` is no wrapper, or one that only accepts arguments' old names."""
    while hasattr(function, "__wrapped__"):
        if getattr(function, "__globals__", {}).get("__name__") not in _DECORATORS:
            return False
        function = function.__wrapped__
    return True
