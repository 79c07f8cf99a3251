"""The generated pages of ops: titles that a reader can tell apart."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_measurements_of_two_machines_have_two_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one name differ in the folder of their results."""
    monkeypatch.syspath_prepend(str(DOCS))
    pages = importlib.import_module("gen_ops")
    for module in ("gen_ops", "results"):
        monkeypatch.delitem(sys.modules, module)  # after this test nobody finds them by these names
    folders = {path.parent.name for path in pages.results.RESULTS.glob("*/layer_norm-*.csv")}
    assert len(folders) > 1
    for name in {path.stem.rpartition("-")[0] for path in pages.results.RESULTS.glob("*/*-*.csv")}:
        tables = map(pages._measured, pages.results.RESULTS.glob(f"*/{name}-*.csv"))
        titles = [title for table in tables for title in re.findall("^### .*", table, re.M)]
        assert len(titles) == len(set(titles)), name
