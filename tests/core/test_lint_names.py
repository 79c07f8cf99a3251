"""``tools/lint_names.py``: the package has each class name once and no banned word in a name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[2] / "tools" / "lint_names.py"
_SPEC = importlib.util.spec_from_file_location("lint_names", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
lint_names = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lint_names)


def test_the_package_has_good_names() -> None:
    assert lint_names.errors(lint_names.ROOT / lint_names.PACKAGE) == []


def test_names_that_occur_twice_and_banned_words_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "train" / "keeper.py").write_text("class Run: ...\nclass _Row: ...\n")
    (tmp_path / "train" / "rows.py").write_text("class _Row: ...\nclass SentHome: ...\n")
    (tmp_path / "models" / "trip.py").write_text("class Run: ...\nclass Hop: ...\n")
    assert [line.removeprefix("fusedops/") for line in lint_names.errors(tmp_path)] == [
        "models/trip.py:1: file trip: not 'trip', but dispatcher",
        "train/keeper.py:1: file keeper: not 'keeper', but checkpointer, PolicyState",
        "train/rows.py:2: class SentHome: not 'home', but combine",
        "models/trip.py:1: class Run: the name occurs 2 times, also in fusedops/train/keeper.py",
    ]
