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


def names(package: Path) -> Iterator[tuple[str, str, str]]:
    """Yield ``file`` or ``class``, the name and its place for each file and public class."""
    for path in sorted(package.rglob("*.py")):
        place = f"{PACKAGE}/{path.relative_to(package)}"
        yield "file", path.stem, f"{place}:1"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield "class", node.name, f"{place}:{node.lineno}"


def words(name: str) -> list[str]:
    """Return the words of a name in snake or camel case, in lower case, in the singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = [part.lower() for part in parts]
    return [word if word in BANNED else word.removesuffix("s") for word in lower]


def errors(package: Path) -> list[str]:
    """Return a line for each name that the package must not have."""
    lines = []
    classes: dict[str, list[str]] = defaultdict(list)
    for kind, text, place in names(package):
        if kind == "class":
            classes[text].append(place)
        bad = [word for word in words(text) if word in BANNED]
        lines += [f"{place}: {kind} {text}: not {word!r}, but {BANNED[word]}" for word in bad]
    for text, places in classes.items():
        if len(places) > 1 and text not in SHARED_NAMES:
            others = ", ".join(place.rpartition(":")[0] for place in places[1:])
            count = f"the name occurs {len(places)} times, also in {others}"
            lines.append(f"{places[0]}: class {text}: {count}")
    return lines


if __name__ == "__main__":
    lines = errors(ROOT / PACKAGE)
    print("\n".join(lines) or "names: no class twice, no banned word in a class or file name")
    sys.exit(1 if lines else 0)
