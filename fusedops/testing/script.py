"""A failure as a script that runs it again."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusedops.testing.case import Case
from fusedops.testing.case_run import Subject

# What verify() uses where nothing else was given: it needs no line in the script.
DEFAULTS: set[Any] = set()


def script(case: Case, subject: Subject, ranks: str, why: str) -> str:
    """Return Python code that runs a case again, and prints and raises what fails."""
    imports: dict[str, None] = {}
    factory = _code(subject.factories[case.model], imports)
    arguments = [
        f"testing.{case.code()}",
        factory if not case.model else f"{{{case.model!r}: {factory}}}",
    ]
    for name in ("parallelize", "batch", "loss", "optimizer"):
        given = getattr(subject, name)
        if given not in DEFAULTS:
            arguments.append(f"{name}={_code(given, imports)}")
    if ranks != "threads":
        arguments.append(f"ranks={ranks!r}")
    comment = "\n".join(f"# {line}".rstrip() for line in why.splitlines())
    inner = "".join(f"        {argument},\n" for argument in arguments)
    head = "\n".join(
        ["import sys", "", "import torch", "", "from fusedops import testing", *imports]
    )
    return f'{comment}\n{head}\n\nif __name__ == "__main__":\n    testing.replay(\n{inner}    )\n'


def _code(function: Callable[..., Any], imports: dict[str, None]) -> str:
    """Return an expression for a function; note the lines that it needs."""
    if isinstance(function, functools.partial):
        imports["import functools"] = None
        inner = [
            _code(function.func, imports),
            *(_value(value, imports) for value in function.args),
        ]
        inner += [f"{name}={_value(value, imports)}" for name, value in function.keywords.items()]
        return f"functools.partial({', '.join(inner)})"
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "<" in name:
        imports[f"{_hole(function)} = None  # put here: {_where(function)}"] = None
        return _hole(function)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file:
        imports["import runpy"] = None
        imports[f"_main = runpy.run_path({str(Path(file).resolve())!r})"] = None
        return f"_main[{name!r}]"
    folder = _folder(module, file)
    if folder is not None:
        imports[f"sys.path.insert(0, {folder!r})"] = None
    imports[f"import {module}"] = None
    return f"{module}.{name}"


def _value(given: Any, imports: dict[str, None]) -> str:
    if callable(given):
        return _code(given, imports)
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key!r}: {_value(v, imports)}" for key, v in given.items()) + "}"
    return repr(given)


def _folder(module: str, file: str | None) -> str | None:
    """Return the folder from which a module is imported, unless Python knows it by itself."""
    if file is None:
        return None
    folder = Path(file).resolve().parents[module.count(".")]
    if Path(file).name == "__init__.py":
        folder = folder.parent
    known = any(part in ("site-packages", "dist-packages") for part in folder.parts)
    return None if known or module.partition(".")[0] == "fusedops" else str(folder)


def _hole(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def _where(function: Callable[..., Any]) -> str:
    try:
        line = inspect.getsourcelines(function)[1]
        return f"{inspect.getsourcefile(function)}, line {line}"
    except (OSError, TypeError):
        return repr(function)
