"""Arguments that a later transformers renamed: the fused forwards take the new names there.

From 5.24 on ``past_key_values`` is ``cache``, with the same meaning. A fused forward is written
with the first name. Where the original's has the second, the patched class gets the same code with
the other name, for the parameter and for the keyword with which the forward calls its children.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

from fusedops.integrations.hf.original_code import with_globals

RENAMED = {"past_key_values": "cache"}  # name that the fused forwards have -> later name
# The decorator that accepts an old name; it changes keywords and nothing else.
_DECORATORS = ("transformers.utils.deprecation",)


def renames(forward: Any, original: Any) -> dict[str, str]:
    """Return the names of ``forward`` that ``original`` has under another name, with that name."""
    ours, theirs = (inspect.signature(function).parameters for function in (forward, original))
    return {
        old: new
        for old, new in RENAMED.items()
        if old in ours and old not in theirs and new in theirs and new not in ours
    }


def with_names_of(forward: Any, original: Any) -> Any:
    """Return ``forward`` with the arguments' names of ``original``; itself if they are the same.

    Args:
        forward: a plain function, the fused forward.
        original: what it stands for.
    """
    names = renames(forward, original)
    if not names:
        return forward
    copy = with_globals(forward, forward.__globals__)
    copy.__code__ = _renamed(copy.__code__, names)
    copy.__annotations__ = {names.get(key, key): v for key, v in forward.__annotations__.items()}
    copy.__qualname__ = forward.__qualname__
    return copy


def _renamed(code: CodeType, names: dict[str, str]) -> CodeType:
    """Return code with other names of its variables, and of the keywords that it calls with.

    Keywords of a call are constants: a tuple of strings, or a string where there is a ``**`` too.
    """

    def other(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(map(other, constant))
        return names.get(constant, constant) if isinstance(constant, str) else constant

    variables = tuple(names.get(name, name) for name in code.co_varnames)
    return code.replace(co_varnames=variables, co_consts=tuple(map(other, code.co_consts)))


def only_renames(function: Any) -> bool:
    """Return whether ``function`` is no wrapper, or one that only accepts arguments' old names."""
    while hasattr(function, "__wrapped__"):
        if getattr(function, "__globals__", {}).get("__name__") not in _DECORATORS:
            return False
        function = function.__wrapped__
    return True
