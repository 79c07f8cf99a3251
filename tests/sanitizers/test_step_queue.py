"""What threads share: the step queue, and collectives through shared memory.

Memory that processes share is invisible to a sanitizer: the ranks of ``shared_channel.cpp`` are
threads of one process over one mapping, with the same C++ protocol.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .harness import HERE, ROOT, assert_clean, build, run

pytestmark = pytest.mark.slow
CHANNEL = [HERE / "shared_channel.cpp", ROOT / "csrc/runtime/shared_memory/sum.isa.cpp"]
KERNELS = ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")
NUM_PROGRAMS, SEED = "120", "0"
BOTH = ("address,undefined", "thread")


@pytest.mark.parametrize("sanitize", BOTH)
def test_threads_share_a_queue_without_a_race_or_a_bad_access(
    tmp_path: Path, sanitize: str
) -> None:
    assert_clean(run(build(tmp_path, [HERE / "step_queue.cpp"], sanitize)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
@pytest.mark.parametrize("sanitize", BOTH)
def test_drawn_programs_of_collectives_are_clean(tmp_path: Path, sanitize: str) -> None:
    program = build(tmp_path, CHANNEL, sanitize, KERNELS)
    assert_clean(run(program, NUM_PROGRAMS, SEED, seconds=600.0))


@pytest.mark.parametrize(
    ("sanitize", "words"), [("thread", "data race"), ("address,undefined", "heap-buffer-overflow")]
)
def test_a_planted_fault_is_found(tmp_path: Path, sanitize: str, words: str) -> None:
    source = tmp_path / "planted.cpp"
    source.write_text(
        "#include <thread>\n#include <vector>\nint shared;\n"
        "int main(int argc, char**) {\n"
        "  std::vector<int> values(3);\n"
        "  std::thread other([] { ++shared; });\n"
        "  ++shared;\n  other.join();\n  return values.data()[argc + 2];\n}\n"
    )
    done = run(build(tmp_path, [source], sanitize))
    assert done.returncode != 0 and words in done.stderr
