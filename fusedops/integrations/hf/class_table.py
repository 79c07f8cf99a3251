"""Values by class that live as long as their class.

A dictionary would keep every class alive that was patched once, and what a rule knows of a class
refers to it. So each value is an attribute of its class. Derived classes have none of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class _Entry:
    def __init__(self, cls: type, value: Any) -> None:
        self.cls = cls
        self.value = value

    def __reduce__(self) -> Any:
        """Become ``None`` where a class is pickled by value: other processes read it again."""
        return type(None), ()


class ClassTable(Generic[T]):
    """A mapping from classes to values."""

    def __init__(self, name: str) -> None:
        """Create an empty table; ``name`` is a different one for each table."""
        self._name = f"_fusedops_{name}"

    def get(self, cls: type) -> T | None:
        """Return the value of a class, or ``None``."""
        entry = getattr(cls, self._name, None)
        return entry.value if entry is not None and entry.cls is cls else None

    def __contains__(self, cls: object) -> bool:
        entry = getattr(cls, self._name, None)
        return entry is not None and entry.cls is cls

    def __getitem__(self, cls: type) -> T:
        if cls not in self:
            raise KeyError(cls)
        value: T = getattr(cls, self._name).value
        return value

    def __setitem__(self, cls: type, value: T) -> None:
        type.__setattr__(cls, self._name, _Entry(cls, value))  # a metaclass may refuse it


def weakly_cached(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the results by the first argument, a class, function or code, while that lives."""
    results: weakref.WeakKeyDictionary[Any, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(key: Any, *args: Any) -> T:
        of_key = results.setdefault(key, {})
        if args not in of_key:
            of_key[args] = function(key, *args)
        return of_key[args]

    return cached


def own_attribute(cls: type, name: str) -> Any:
    """Return the stored attribute of a class; ``None`` where it has none, or torch's."""
    for base in cls.__mro__:
        if base is nn.Module or base is object:
            return None
        if name in vars(base):
            return vars(base)[name]
    return None
