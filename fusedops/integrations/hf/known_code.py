"""Which code of transformers and torch the fused forwards were written for, by its digest.

The classes of the tables, whose forward is replaced by one that was written by hand, are listed in
``known_code.toml`` with the digests of that code in the releases that were read. The rules refuse
a class whose code has another digest, because a later release may compute more.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from fusedops.integrations.hf.rules.rule import PatchRule, copyable
from fusedops.integrations.hf.same_code import own_attribute

FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def known_digests() -> dict[str, dict[str, dict[str, str]]]:
    """Return module -> name of a class or function -> digest -> releases with that code."""
    return tomllib.loads(FILE.read_text())


def code(of: Any) -> str:
    """Return the code of a function, or of a class's forward, with all that it calls nearby.

    These are the methods of the class and the functions of its module, to any depth. Docstrings,
    comments and annotations are left out; decorators are not.

    Raises:
        OSError: there is no source.
    """
    function: Any = inspect.unwrap(getattr(of, "forward", of))
    functions = {function: _syntax(function)}
    pending = [function]
    while pending:
        function = pending.pop(0)
        for node in ast.walk(functions[function]):
            called = None
            if isinstance(node, ast.Attribute) and isinstance(of, type):
                called = own_attribute(of, node.attr)
            elif isinstance(node, ast.Name):
                called = function.__globals__.get(node.id)
            if isinstance(called, FunctionType) and called.__module__ == of.__module__:
                called = inspect.unwrap(called)
                if called not in functions:
                    functions[called] = _syntax(called)
                    pending.append(called)
    return "\n\n".join(map(ast.unparse, functions.values()))


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


def digest(of: Any) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of ``code(of)``."""
    return hashlib.sha256(code(of).encode()).hexdigest()[:12]


def unknown_code(of: Any) -> str | None:
    """Return why a class or function is not as a fused forward was written for, or ``None``."""
    library, _, module = of.__module__.partition(".")
    known = known_digests().get(module, {}).get(of.__name__, {})
    name = f"{of.__name__}.forward" if isinstance(of, type) else of.__name__
    try:
        current = digest(of)
    except OSError:
        return f"the source of {name} is not there to be compared"
    if current in known:
        return None
    return (
        f"this {library} has another {name}: digest {current}, known: {', '.join(known) or 'none'}"
    )


def copyable_if_known(make: Callable[..., PatchRule]) -> Callable[..., PatchRule]:
    """Tell a function that makes a class's rule whether the code of that class is known.

    Args:
        make: as in ``copyable``, and takes the keyword ``unknown``: ``unknown_code`` of the class,
            for a copy that of the class which it is a copy of.
    """

    @functools.wraps(make)
    def made(original: type[nn.Module], module_name: str, *args: Any, **options: Any) -> PatchRule:
        with_reason = functools.partial(make, unknown=unknown_code(original))
        return copyable(with_reason)(original, module_name, *args, **options)

    return made
