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
