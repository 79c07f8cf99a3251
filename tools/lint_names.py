"""Names of classes and files: none twice, none with a word that the field does not use.

    python tools/lint_names.py          # exit code 1 and one line for each name

A public class name occurs once in ``fusedops/``. Names of classes and files contain none of
``BANNED``, whose replacements say what a developer of Megatron, DeepSpeed or torchtitan would
search for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
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

# Subclasses carry the name of the class that they replace.
SHARED_NAMES = ("CrossEntropyLoss", "LayerNorm", "MLP", "RMSNorm")


class Name(NamedTuple):
    """A name that is public, and where it is.

    Attributes:
        kind: ``"file"`` or ``"class"``.
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
    """Yield the names of a package's files and public classes."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        yield Name("file", path.stem, relative, 1)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield Name("class", node.name, relative, node.lineno)


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


if __name__ == "__main__":
    lines = errors(ROOT / PACKAGE)
    print("\n".join(lines) or "names: no class twice, no banned word in a class or file name")
    sys.exit(1 if lines else 0)
