"""Arenas: the search for offsets, and steps that never change a live buffer."""

from __future__ import annotations

from pathlib import Path

import native
import pytest
import torch

from .harness import HERE, ROOT, assert_clean, build, run

pytestmark = pytest.mark.slow
CORE = ROOT / "csrc/runtime/arena/step_arena.cpp"
SEARCH = [ROOT / f"csrc/host/arena{part}.cpp" for part in ("", "_exact", "_greedy")]
BOTH = ("address,undefined", "thread")


def test_drawn_buffers_are_placed_without_a_bad_access(tmp_path: Path) -> None:
    assert_clean(run(build(tmp_path, [HERE / "arena.cpp", *SEARCH], "address,undefined")))


@pytest.mark.parametrize("sanitize", BOTH)
def test_live_buffers_never_change(tmp_path: Path, sanitize: str) -> None:
    assert_clean(run(build(tmp_path, [HERE / "step_arena.cpp", CORE], sanitize)))


@pytest.mark.parametrize("sanitize", BOTH)
def test_buffers_of_a_gpu_keep_their_values_for_every_stream(tmp_path: Path, sanitize: str) -> None:
    home = native.cuda_home()
    if home is None:
        pytest.skip("no CUDA toolkit, of which the headers are needed")
    libraries = Path(torch.__file__).parent / "lib"
    options = [
        *(f"-I{native.COMPAT}", f"-isystem{home}/include"),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-lc10"),
    ]
    sources = [HERE / "gpu_arena.cpp", ROOT / "csrc" / "cuda" / "arena_allocator.cpp", CORE]
    assert_clean(run(build(tmp_path, sources, sanitize, options)))
