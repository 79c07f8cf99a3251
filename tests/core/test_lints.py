"""``tools/lint_names.py`` and ``tools/lint_includes.py`` on this tree."""

from __future__ import annotations

import lint_includes
import lint_names


def test_the_package_has_good_names() -> None:
    assert lint_names.errors(lint_names.ROOT / lint_names.PACKAGE) == []


def test_csrc_includes_run_one_way() -> None:
    assert lint_includes.errors(lint_includes.ROOT / "csrc") == []
