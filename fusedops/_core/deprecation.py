"""Former names: accepted for one release, with a ``DeprecationWarning`` that has the new one.

``@renamed(old=Renamed("new", convert))`` above a dataclass lets its constructor, ``fill`` of a TOML
table and the options of ``verify`` take the former name of a field. ``former_names`` makes the
``__getattr__`` of a module that had other names for its classes or functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Renamed:
    """What became of a field."""

    name: str  # the name that it has now
    convert: Callable[[Any], Any] = lambda value: value  # makes today's value of a former one


def renamed(**former: Renamed) -> Callable[[Class], Class]:
    """Return a decorator that lets a dataclass take former names of its fields as keywords."""

    def decorate(kind: Class) -> Class:
        construct = kind.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **present(kind, kwargs))

        kind.__init__ = init  # type: ignore[misc]
        kind._former_fields = former  # type: ignore[attr-defined]
        return kind

    return decorate


def former_fields(kind: type) -> Mapping[str, Renamed]:
    """Return the former names of a class's fields."""
    return getattr(kind, "_former_fields", {})


def present(kind: type, values: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
    """Return values by the names that the fields of a class have now.

    Args:
        kind: the class.
        values: by name, former ones among them; each of these is a ``DeprecationWarning``.
        stacklevel: whose line the warning shows.

    Raises:
        TypeError: a field is given under both names.
    """
    result = dict(values)
    for old, field in former_fields(kind).items():
        if old not in result:
            continue
        if field.name in result:
            raise TypeError(f"{kind.__name__}: {old} is the former name of {field.name}: give one")
        result[field.name] = field.convert(result.pop(old))
        warnings.warn(
            f"{kind.__name__}: {old} is now {field.name}={result[field.name]!r}; the former name "
            "goes with the next release",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
    return result


def former_names(module: str, stacklevel: int = 2, **former: Any) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that had other names for its classes or functions.

    Args:
        module: its name.
        stacklevel: whose line the warning shows; 3 if a ``__getattr__`` calls the result.
        **former: by former name, the class or function, which knows its own module and name.
    """

    def lookup(name: str) -> Any:
        if name not in former:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = former[name]
        warnings.warn(
            f"{module}.{name} is now {value.__module__}.{value.__qualname__}; the former name goes "
            "with the next release",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return value

    return lookup
