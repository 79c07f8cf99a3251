"""The search for offsets in an arena has no access out of bounds and no undefined behaviour."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import HERE, ROOT, assert_clean, build, run

pytestmark = pytest.mark.slow
HOST = ROOT / "csrc" / "host"
SOURCES = [HERE / "arena.cpp", *(HOST / f"arena{part}.cpp" for part in ("", "_exact", "_greedy"))]


def test_drawn_buffers_are_placed_without_a_bad_access(tmp_path: Path) -> None:
    assert_clean(run(build(tmp_path, SOURCES, "address,undefined")))
