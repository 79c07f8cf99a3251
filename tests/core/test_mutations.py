"""``tests/mutations.toml``: each entry fits the tree, and each package has some."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mutations
import pytest

_MUTATIONS = mutations.mutations()
_PACKAGE = mutations.ROOT / "fusedops"


def _part(file: str) -> str:
    """Return the package of a file: of ``parallel`` and ``integrations`` the one inside."""
    package, *inside = Path(file).relative_to("fusedops").parts[:-1]
    return "/".join([package, *inside[:1]]) if package in ("parallel", "integrations") else package


@pytest.mark.parametrize("mutation", _MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_entry_fits_the_tree(mutation: mutations.Mutation) -> None:
    assert mutation.mistake() is None


def test_each_package_has_two_faults_and_no_name_occurs_twice() -> None:
    parts = Counter(_part(mutation.file) for mutation in _MUTATIONS)
    packages = {path.parent.name for path in _PACKAGE.glob("*/__init__.py")} - {"parallel"}
    packages |= {f"parallel/{path.parent.name}" for path in _PACKAGE.glob("parallel/*/__init__.py")}
    packages |= {"integrations/hf", "integrations/graph"}
    assert {package for package in packages if parts[package] < 2} == set()
    assert len({mutation.name for mutation in _MUTATIONS}) == len(_MUTATIONS)


@pytest.mark.parametrize(
    ("status", "output", "found", "text"),
    [
        (0, "3 passed", False, "NOT FOUND"),
        (1, "FAILED tests/a.py::test_b[x y] - AssertionError: 1", True, "tests/a.py::test_b[x y]"),
        (1, "ERROR tests/a.py::test_b - ValueError: no", True, "found by tests/a.py::test_b"),
        (1, "ERROR tests/a.py - SyntaxError: no", False, "cannot be imported"),
        (1, "FAILED tests/a.py::test_b - ImportError: no", False, "cannot be imported"),
        (2, "ERROR tests/a.py", False, "pytest ended with status 2"),
        (4, "no such test", False, "pytest ended with status 4"),
        (None, "", False, "did not end"),
    ],
)
def test_a_broken_import_is_no_fault_that_was_found(
    status: int | None, output: str, found: bool, text: str
) -> None:
    verdict = mutations._verdict(status, output)
    assert verdict[0] == found and text in verdict[1]


def test_a_copy_has_the_fault_and_the_tree_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations.compileall, "compile_dir", lambda *_, **__: True)
    mutation = _MUTATIONS[0]
    with mutations._snapshot() as snapshot, mutations._planted(snapshot, mutation) as tree:
        assert (tree / mutation.file).read_text().count(mutation.old) == 0
        assert (snapshot / mutation.file).read_text() == (
            mutations.ROOT / mutation.file
        ).read_text()
        assert (snapshot / mutation.file).stat().st_ino != (
            mutations.ROOT / mutation.file
        ).stat().st_ino
        assert (tree / "fusedops" / "lib").is_symlink()
    assert mutation.mistake() is None and not snapshot.exists()
