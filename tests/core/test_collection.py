"""The tests can be collected where torch, Triton, NumPy and pytest are all that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A plugin that makes the imports of everything else fail, as if it was not installed.
WITHOUT = """
import sys

MISSING = {missing!r}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Finder())
"""
MISSING = (
    *("accelerate", "click", "datasets", "expecttest", "hypothesis", "matplotlib", "pandas"),
    *("psutil", "rich", "safetensors", "scipy", "tokenizers", "transformers", "typer"),
)
HOT = ("hot_configurations", "hot_lists", "gpu_behaviour", "hot_coverage")


def collected(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "without_packages.py").write_text(WITHOUT.format(missing=MISSING))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "without_packages"]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those that are installed here
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.ci
def test_gpu_tests_of_ops_are_collected_without_any_other_package(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    files = [f"tests/ops/test_{name}.py" for name in ("all_ops", *HOT)]
    done = collected(tmp_path, "-m", "gpu", *files, "tests/core/test_timer.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in (
        "test_values_and_gradients_match_float64[triton-cuda-bfloat16-rms_norm",
        "test_values_and_gradients_match_float64[cuda-cuda-float32-rms_norm",
        "test_hot_samples_match_float64[attention-bfloat16-attention D128 of 4]",
        "test_a_graph_runs_with_changed_inputs[default-rms_norm]",
        "test_a_step_of_many_tensors_matches_float64",
    ):
        assert name in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
def test_everything_is_collected_without_any_other_package(tmp_path: Path) -> None:
    done = collected(tmp_path, "tests", "--ignore=tests/clients")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    count = re.search(r"(\d+)(?:/\d+)? tests collected", done.stdout)
    assert count is not None and int(count[1]) > 1000, done.stdout[-500:]


def test_files_of_tests_that_make_and_workflows_name_exist() -> None:
    files = [ROOT / "Makefile", *(ROOT / ".github" / "workflows").glob("*.yml")]
    text = "\n".join(path.read_text() for path in files).replace("\\\n", " ")
    named = set(re.findall(r"tests/[\w/]+\.py", text))
    for prefix, suffix, words in re.findall(
        r"\$\(addprefix (tests/\w+/test_),(?:\$\(addsuffix (\.py),)?([\w. ]+)\)", text
    ):
        named |= {f"{prefix}{word}{suffix}" for word in words.split()}
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
