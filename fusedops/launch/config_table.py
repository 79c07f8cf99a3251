"""Tables of TOML into dataclasses, strictly: unknown keys, missing keys and other types are errors.

Knows no key by name. What a value may be stands in the dataclass: its types here, its range in
``__post_init__``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fusedops._core import checks
from fusedops.terminal.files import UserError

T = TypeVar("T")


class InputError(UserError, ValueError):
    """What the user gave cannot be trained with; the message is a sentence that says why."""


def load(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises:
        InputError: it cannot be read or is not TOML; the message has line and column.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file: it must be TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}; correct it there") from None


def override(table: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return a table with ``key.subkey=value`` applied in turn; a value is TOML, or else a text.

    Raises:
        InputError: there is no ``=``, or a key leads into what is no table.
    """
    table = copy.deepcopy(table)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set must be key=value, such as optimizer.lr=3e-4: {assignment!r}")
        *path, last = key.strip().split(".")
        inner = table
        for index, name in enumerate(path):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                parent = ".".join(path[: index + 1])
                raise InputError(f"--set {assignment}: {parent} is no table: set {parent} itself")
        try:
            inner[last] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            inner[last] = text
    return table


def fill(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Return a dataclass made from a table; tables inside fill dataclasses inside.

    Args:
        kind: the dataclass.
        table: its fields by name; those with defaults may be absent.
        where: what the table is called in messages; empty for the whole file.

    Raises:
        InputError: a key is unknown (with the nearest that is known) or missing, or a value has
            another type or is out of range.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise InputError(unknown(key, fields, where))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        path = f"{where}.{name}" if where else name
        if name in table:
            try:
                values[name] = _converted(hints[name], table[name], path)
            except TypeError:
                got = checks.shown(table[name])
                raise InputError(f"{path} must be {_named(hints[name])}, got {got}") from None
        elif dataclasses.is_dataclass(hints[name]) and field.default is dataclasses.MISSING:
            values[name] = fill(hints[name], {}, path)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{path} is missing: give it a value")
    try:
        return kind(**values)
    except (ValueError, TypeError, checks.UnsupportedError) as error:
        raise InputError(str(error)) from None


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, Mapping)
        values |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return values


def unknown(key: str, known: Collection[str], where: str) -> str:
    """Return the sentence for a key that does not exist, with the nearest that does."""
    near = checks.nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {key!r} in {f'[{where}]' if where else 'the configuration'}: {hint}"


def _converted(hint: Any, value: Any, path: str) -> Any:
    """Return a value as its type has it; a ``TypeError`` where it has another type."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return fill(hint, value, path)  # type: ignore[arg-type]
    if kind in (typing.Union, types.UnionType):
        for alternative in inner:
            with contextlib.suppress(TypeError):
                return _converted(alternative, value, path)
    elif kind is tuple and isinstance(value, (list, tuple)):
        hints = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(hints) == len(value):
            return tuple(_converted(*pair, path) for pair in zip(hints, value, strict=True))
    elif isinstance(value, bool) and kind is not bool:
        pass  # which Python counts among the integers
    elif kind is float and isinstance(value, (int, float)):
        return float(value)
    elif isinstance(value, kind):
        return value
    raise TypeError


def _named(hint: Any) -> str:
    """Return a type in words."""
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in words:
        return words[hint]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(kind) for kind in inner if kind is not type(None))
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f" of {len(inner)}"
        return f"a list{count}, each {_named(inner[0])}"
    is_table = origin is dict or dataclasses.is_dataclass(hint)
    return "a table" if is_table else getattr(hint, "__name__", str(hint))
