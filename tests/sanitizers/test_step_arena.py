"""Steps in arenas have no data race and no bad access, and never change a live buffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import HERE, ROOT, assert_clean, build, run

pytestmark = pytest.mark.slow
SOURCES = [HERE / "step_arena.cpp", ROOT / "csrc" / "step_arena.cpp"]


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_live_buffers_never_change(tmp_path: Path, sanitize: str) -> None:
    assert_clean(run(build(tmp_path, SOURCES, sanitize)))
