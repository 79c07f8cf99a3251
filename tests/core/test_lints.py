"""``tools/lint_names.py`` and ``tools/lint_includes.py`` on this tree and on made-up ones.

The package has each class name once and no banned word in a name; an include of a higher folder of
``csrc`` is reported.
"""

from __future__ import annotations

from pathlib import Path

import lint_includes
import lint_names


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


def test_csrc_includes_run_one_way() -> None:
    assert lint_includes.errors(lint_includes.ROOT / "csrc") == []


def test_an_upward_include_and_an_unknown_folder_are_reported(tmp_path: Path) -> None:
    for folder in ("common", "cpu/gemm", "cpu/norm", "other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "common/dtype.h").write_text("#include <cmath>\n")
    (tmp_path / "cpu/gemm/gemm.h").write_text('#include "../../common/dtype.h"\n')
    (tmp_path / "cpu/norm/norm.h").write_text('#include "../gemm/gemm.h"\n#include "missing.h"\n')
    (tmp_path / "other/file.h").write_text("")
    assert lint_includes.errors(tmp_path) == [
        f"{tmp_path}/cpu/norm/norm.h: cpu/norm must not include ../gemm/gemm.h of cpu/gemm",
        f"{tmp_path}/other/file.h: other has no row in tools/lint_includes.py",
    ]
