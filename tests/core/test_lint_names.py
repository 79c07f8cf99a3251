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
    (tmp_path / "train" / "keeper.py").write_text(
        "class Run:\n    def say(self): ...\n    def _told(self): ...\nclass _Row: ...\n"
    )
    (tmp_path / "train" / "rows.py").write_text("class _Row: ...\ndef send_home(): ...\n")
    (tmp_path / "models" / "trip.py").write_text("class Run: ...\nclass Hop: ...\n")
    assert [line.removeprefix("fusedops/") for line in lint_names.errors(tmp_path)] == [
        "models/trip.py:1: file trip: not 'trip', but dispatcher",
        "train/keeper.py:1: file keeper: not 'keeper', but checkpointer, PolicyState",
        "train/keeper.py:2: function say: not 'say', but report, print_message",
        "train/rows.py:2: function send_home: not 'home', but combine",
        "models/trip.py:1: class Run: the name occurs 2 times, also in fusedops/train/keeper.py",
    ]


def test_phrases_on_a_page_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A run resumes.\nThe run goes on; the toolbox has what is whole.\n")
    assert [line.removeprefix(f"{page}:") for line in lint_names.phrases([page])] == [
        "2: 'goes on' is no standard English of the field",
        "2: 'what is whole' is no standard English of the field",
    ]


def test_variables_that_say_nothing_are_reported(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(
        "def total(found):\n    for each in found:\n        result = each\n    return result\n"
    )
    assert lint_names.variables(tmp_path) == [
        "fusedops/sums.py:1: 'found' does not say what the value is",
        "fusedops/sums.py:2: 'each' does not say what the value is",
    ]
