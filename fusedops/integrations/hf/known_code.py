"""Which code the rules of tables were written for, by its digest.

``known_code.toml`` lists classes and functions of transformers with the digests of their code in
the releases that were read. A class with one of these digests takes the rule, whatever its name is.
One of a listed name with another digest is refused, because a later release may compute more.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import tomllib
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fusedops.integrations.hf.class_table import own_attribute, weakly_cached

FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def known_digests() -> dict[str, dict[str, dict[str, str]]]:
    """Return section -> name of a class or function -> digest -> releases with that code."""
    return tomllib.loads(FILE.read_text())


def code(of: Any) -> str:
    """Return the code of a function, or of a class's forward, with all that it calls nearby.

    These are the methods of the class and the functions of its module, to any depth; what other
    global names stand for follows. Docstrings, comments and annotations are left out; decorators
    are not. Without source it raises ``OSError``.
    """
    function: Any = inspect.unwrap(getattr(of, "forward", of))
    functions = {function: _syntax(function)}
    values: dict[str, str] = {}
    pending = [function]
    while pending:
        function = pending.pop(0)
        for node in ast.walk(functions[function]):
            called = None
            if isinstance(node, ast.Attribute) and isinstance(of, type):
                called = own_attribute(of, node.attr)
            elif isinstance(node, ast.Name) and node.id in function.__globals__:
                called = function.__globals__[node.id]
                values[node.id] = _described(called)
            if isinstance(called, FunctionType) and called.__module__ == of.__module__:
                called = inspect.unwrap(called)
                values.pop(called.__name__, None)
                if called not in functions:
                    functions[called] = _syntax(called)
                    pending.append(called)
    meanings = [f"{name} = {value}" for name, value in sorted(values.items())]
    return "\n\n".join([*map(ast.unparse, functions.values()), *meanings])


def _syntax(function: FunctionType) -> ast.AST:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree


def _described(value: Any) -> str:
    """Return what a global name stands for: a number, or where an object comes from."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', type(value).__module__)}.{name}"


@weakly_cached
def digest(of: Any) -> str | None:
    """Return the first 12 digits of the SHA-256 of ``code(of)``; ``None`` without source."""
    try:
        return hashlib.sha256(code(of).encode()).hexdigest()[:12]
    except (OSError, TypeError, SyntaxError):
        return None


def known_as(of: Any, section: str) -> str | None:
    """Return the name under which the code of a class or function is listed, or ``None``."""
    current = None if of is None else digest(of)
    entries = known_digests()[section].items()
    return next((name for name, known in entries if current in known), None)


def unknown_code(of: Any, section: str) -> str | None:
    """Return why the code of a class or function of a listed name is not known, or ``None``."""
    file = of.__module__.rpartition(".modeling_")[2]
    known = known_digests()[section]
    listed = known.get(f"{file}.{of.__name__}") or known.get(of.__name__)
    current = digest(of)
    if listed is None or current in listed:
        return None
    return (
        f"this transformers has another {of.__name__}: the digest of its code is {current}, "
        f"known are {', '.join(listed)}"
    )
