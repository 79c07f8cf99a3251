"""The step queue under the sanitizers: no data race, no access out of bounds, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import HERE, assert_clean, build, run

pytestmark = pytest.mark.slow
SOURCES = [HERE / "step_queue.cpp"]


def test_threads_share_a_queue_without_a_data_race(tmp_path: Path) -> None:
    assert_clean(run(build(tmp_path, SOURCES, "thread")))


def test_threads_share_a_queue_without_a_bad_access(tmp_path: Path) -> None:
    assert_clean(run(build(tmp_path, SOURCES, "address,undefined")))


def test_a_forked_process_refuses_the_queue_and_ends(tmp_path: Path) -> None:
    program = build(tmp_path, SOURCES, "undefined")
    assert_clean(run(program, "fork", seconds=60.0))


def test_the_sanitizers_see_a_race_and_a_bad_access(tmp_path: Path) -> None:
    source = tmp_path / "planted.cpp"
    source.write_text(
        "#include <thread>\n#include <vector>\nint shared;\n"
        "int main(int argc, char**) {\n"
        "  std::vector<int> values(3);\n"
        "  std::thread other([] { ++shared; });\n"
        "  ++shared;\n  other.join();\n  return values.data()[argc + 2];\n}\n"
    )
    for sanitize, words in (
        ("thread", "data race"),
        ("address,undefined", "heap-buffer-overflow"),
    ):
        done = run(build(tmp_path, [source], sanitize))
        assert done.returncode != 0 and words in done.stderr
