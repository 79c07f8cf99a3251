"""Former names: accepted for one release, with a ``DeprecationWarning`` that has the new one.

``@renamed(old=Renamed("new", convert))`` above a dataclass lets its constructor, ``fill`` of a TOML
table and the options of ``verify`` take the former name of a field. ``@renamed_arguments`` does
that for the keywords of a function. ``former_names`` makes the ``__getattr__`` of a module that had
other names for its classes or functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


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
    return _by_new_name(kind.__name__, former_fields(kind), values, stacklevel + 1)


def renamed_arguments(**former: str) -> Callable[[Function], Function]:
    """Return a decorator that lets a function take former names of its keyword arguments."""
    renames = {old: Renamed(new) for old, new in former.items()}

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **_by_new_name(function.__qualname__, renames, kwargs, 3))

        return call  # type: ignore[return-value]

    return decorate


def _by_new_name(
    owner: str, former: Mapping[str, Renamed], values: Mapping[str, Any], stacklevel: int
) -> dict[str, Any]:
    """Return values by today's names; ``owner`` is whose names they are, for messages."""
    result = dict(values)
    for old, field in former.items():
        if old not in result:
            continue
        if field.name in result:
            raise TypeError(f"{owner}: {old} is the former name of {field.name}: give one")
        result[field.name] = field.convert(result.pop(old))
        warnings.warn(
            f"{owner}: {old} is now {field.name}={result[field.name]!r}; the former name "
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
