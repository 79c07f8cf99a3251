"""Words that names and texts must not have: a class name twice, a word of no meaning in the field.

    python tools/lint_names.py          # exit code 1 and one line for each name

A public class name occurs once in ``fusedops/``. File names, names of classes and names of public
functions contain none of ``BANNED``, whose replacements say what a developer of Megatron, DeepSpeed
or torchtitan would search for. No variable or argument is one of ``VARIABLES``, which do not say
what a value is. Pages (``README.md`` and ``docs``), and docstrings, comments and messages of the
package and of ``csrc``, contain none of ``PHRASES``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fusedops"

BANNED = {
    "again": "recompute",
    "ahead": "prefetch_depth",
    "aside": "unsupported",
    "beliefs": "CallSignature",
    "beside": "overlapping",
    "claimed": "lock",
    "dearest": "slowest",
    "depart": "dispatch",
    "departure": "DispatchHandle",
    "draws": "seeds",
    "each": "the name of the element",
    "found": "the name of the result",
    "held": "saved, live",
    "home": "combine",
    "joined": "gathered, merged",
    "keeper": "checkpointer, PolicyState",
    "maker": "producer",
    "meeting": "ThreadCollective",
    "mover": "offloader",
    "outlast": "timeout",
    "prepared": "build",
    "relay": "second_hop",
    "remade": "recomputed",
    "said": "message",
    "say": "report, print_message",
    "taken": "StepResult, assigned",
    "told": "report, message",
    "travel": "dispatch",
    "trip": "dispatcher",
    "turns": "phases, schedule",
    "wanted": "expected, needed",
    "watcher": "watchdog, callback",
    "way": "AllToAll",
    "whole": "unsharded, replicated",
}

VARIABLES = ("each", "found", "held", "taken", "told", "wanted", "whole")

PHRASES = (
    "anew",
    "as it is",
    "beside",
    "goes on",
    "held",
    "in turns",
    "keeper",
    "made again",
    "made anew",
    "remade",
    "stand beside",
    "told",
    "what is whole",
)

# Subclasses carry the name of the class that they replace.
SHARED_NAMES = ("CrossEntropyLoss", "LayerNorm", "MLP", "RMSNorm")


class Name(NamedTuple):
    """A name that is public, and where it is.

    Attributes:
        kind: ``"file"``, ``"class"`` or ``"function"``.
        text: the name.
        path: of its file, from the root of the package.
        line: in it.
    """

    kind: str
    text: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{PACKAGE}/{self.path}:{self.line}: {self.kind} {self.text}"


def names(package: Path) -> Iterator[Name]:
    """Yield the names of a package's files, classes, public functions and public methods."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        yield Name("file", path.stem, relative, 1)
        for node, kind in _definitions(ast.parse(path.read_text(encoding="utf-8"))):
            yield Name(kind, node.name, relative, node.lineno)


def _definitions(
    node: ast.AST,
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not child.name.startswith("_"):
                yield child, "function"
        elif isinstance(child, ast.ClassDef):
            if not child.name.startswith("_"):
                yield child, "class"
                yield from _definitions(child)
        else:
            yield from _definitions(child)


def words(name: str) -> list[str]:
    """Return the words of a name in snake or camel case, in lower case, in the singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = [part.lower() for part in parts]
    return [word if word in BANNED else word.removesuffix("s") for word in lower]


def errors(package: Path) -> list[str]:
    """Return a line for each name that the package must not have."""
    lines = []
    classes: dict[str, list[Name]] = defaultdict(list)
    for name in names(package):
        if name.kind == "class":
            classes[name.text].append(name)
        bad = [word for word in words(name.text) if word in BANNED]
        lines += [f"{name}: not {word!r}, but {BANNED[word]}" for word in bad]
    for text, places in classes.items():
        if len(places) == 1 or text in SHARED_NAMES:
            continue
        others = ", ".join(f"{PACKAGE}/{name.path}" for name in places[1:])
        lines.append(f"{places[0]}: the name occurs {len(places)} times, also in {others}")
    return lines


def variables(package: Path) -> list[str]:
    """Return a line for each variable or argument that is one of ``VARIABLES``."""
    lines = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = _kernel_lines(tree)
        for node in ast.walk(tree):
            if getattr(node, "lineno", 0) in kernels:
                continue
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name in VARIABLES:
                place = f"{PACKAGE}/{path.relative_to(package)}:{node.lineno}"
                lines.append(f"{place}: {name!r} does not say what the value is")
    return lines


def _kernel_lines(tree: ast.AST) -> set[int]:
    """Return the lines of Triton kernels: their text is part of the key of their machine code."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(
            ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
        )
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def phrases(texts: Iterable[Path]) -> list[str]:
    """Return a line for each of ``PHRASES`` on a page, or in the texts of a source file."""
    # A quoted word is a value of the code, not English.
    banned = re.compile(rf"(?<![\"'])\b({'|'.join(PHRASES)})\b(?![\"'])")
    lines = []
    for path in texts:
        text = path.read_text(encoding="utf-8")
        kernels = _kernel_lines(ast.parse(text)) if path.suffix == ".py" else set()
        lines += [
            f"{path}:{number}: {match.group()!r} is no standard English of the field"
            for number, line in enumerate(text.splitlines(), start=1)
            if number not in kernels
            for match in banned.finditer(line)
        ]
    return lines


if __name__ == "__main__":
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    python = sorted((ROOT / PACKAGE).rglob("*.py"))
    cpp = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
    lines = [
        *errors(ROOT / PACKAGE),
        *variables(ROOT / PACKAGE),
        *phrases([*pages, *python, *cpp]),
    ]
    print("\n".join(lines) or "names: none twice, no banned word in a name, on a page or in a text")
    sys.exit(1 if lines else 0)
