"""A corpus of a few generated Python files, both sides of the split populated."""

from __future__ import annotations

from pathlib import Path


def make_corpus_directory(root: Path, files: int = 150) -> Path:
    """Write ``files`` small modules, one of them with text beyond ASCII, and an empty one."""
    (root / "inner").mkdir(parents=True)
    for index in range(files):
        name = f"function_{index}"
        lines = [f"def {name}(a, b={index}):", f'    """Return {index}."""']
        lines += [f"    a = a + {index * step} * b" for step in range(6)]
        folder = root / "inner" if index % 2 else root
        (folder / f"{name}.py").write_text("\n".join([*lines, "    return a", ""]))
    (root / "greek.py").write_text("alpha = 'αβγ → ∞'\n", encoding="utf-8")
    (root / "__init__.py").write_text("")
    (root / "notes.txt").write_text("no Python")
    return root
