"""Write the files of a new op as a copy of the nearest existing one: every check passes at once.

    python tools/new_op.py dyt --like bias_gelu

The copy computes what its model computes. Replace the mathematics, the arguments and the words part
by part, and run ``python tools/check_op.py dyt`` after each: docs/adding_an_op.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "fusedops/ops",
    "fusedops/specs",
    "fusedops/kernels",
    "csrc/common",
    "csrc/cpu",
    "tests/ops",
)
# Modules with a function per op, and an entry of a table for it.
TABLES = ("tools/kernel_cases", "tests/hot_samples")


def main(arguments: list[str] | None = None) -> None:
    """Write the files, and print them and what follows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the op, in snake case: scale_add")
    parser.add_argument("--like", required=True, help="the existing op that is most similar")
    options = parser.parse_args(arguments)
    try:
        written = write(ROOT, options.name, options.like)
    except ValueError as error:
        parser.error(str(error))
    for path in written:
        print(f"wrote {path.relative_to(ROOT)}")
    python = [path for path in written if path.suffix == ".py"]
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run([ruff, "check", "-q", "--fix", *python], cwd=ROOT, check=True)
    subprocess.run([ruff, "format", "-q", *python], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "tests/core/test_public_api.py"], cwd=ROOT, check=True)
    print(f"recorded the public name; next: python tools/check_op.py {options.name}")


def write(root: Path, name: str, like: str) -> list[Path]:
    """Write the files of op ``name`` under ``root`` as those of op ``like``; return their paths.

    Raises:
        ValueError: ``name`` is no name for an op or exists, or ``like`` is no op.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"{name!r} is no name of an op: write snake case, such as scale_add")
    models = {path: _renamed_path(path, name, like) for path in _files(root, like)}
    if root / f"fusedops/ops/{like}.py" not in models:
        known = sorted(path.stem for path in (root / "fusedops/specs").glob("[a-z]*.py"))
        raise ValueError(f"--like {like}: there is no such op; known: {', '.join(known)}")
    existing = [path for path in models.values() if path.exists()]
    if existing:
        raise ValueError(f"{existing[0].relative_to(root)} exists: choose another name")
    for source, target in models.items():
        target.write_text(renamed(source.read_text(), name, like))
    tables = [path for folder in TABLES for path in sorted((root / folder).glob("*.py"))]
    edited = [root / "fusedops/ops/__init__.py", *tables]
    changed = [path for path in edited if _add_entries(path, name, like)]
    return [*models.values(), *changed]


def renamed(text: str, name: str, like: str) -> str:
    """Return text about op ``like`` as text about op ``name``; names that only contain it stay."""
    camel, like_camel = (word.title().replace("_", "") for word in (name, like))
    word = rf"(?<![A-Za-z0-9])(?<![a-z0-9]_){like}(?=(_forward|_backward|_cases)?(?![a-z0-9_]))"
    text = re.sub(word, name, text)
    return re.sub(rf"\b{like_camel}(?=Forward|Backward|\b)", camel, text)


def _files(root: Path, like: str) -> list[Path]:
    pattern = re.compile(rf"(test_)?{like}(\.isa)?\.(py|h|cpp)")
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    return [path for path in paths if pattern.fullmatch(path.name)]


def _renamed_path(path: Path, name: str, like: str) -> Path:
    return path.with_name(path.name.replace(like, name))


def _add_entries(path: Path, name: str, like: str) -> bool:
    """Add to a module its function, imports and table rows of ``like`` once more, renamed."""
    before = text = path.read_text()
    function = rf"^def _?{like}(_cases)?\(.*?(?=^\S(?!\)))"
    text = re.sub(
        function, lambda match: match[0] + renamed(match[0], name, like), text, flags=re.M | re.S
    )
    row = rf'^ *(from fusedops\.ops\.{like} import {like}$|"{like}"(: .*)?,$)'
    text = re.sub(
        row, lambda match: f"{match[0]}\n{renamed(match[0], name, like)}", text, flags=re.M
    )
    imported = rf"^(from fusedops\.kernels import .*\b){like}\b"
    text = re.sub(imported, lambda match: f"{match[0]}, {name}", text, flags=re.M)
    path.write_text(text)
    return text != before


if __name__ == "__main__":
    main()
