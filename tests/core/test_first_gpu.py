"""The first hour on a GPU: errors that end or block a process cost one test; and its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh_process
import pytest
import torch
from first_gpu import __main__ as first_gpu
from first_gpu import figure_list, figures, plugin
from test_collection import MISSING
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops.bench.limits import Limit, Limits
from fusedops.runtime.timer import TimingPlan
from fusedops.specs import all_specs

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "ops"))  # fake_gpu
LIMITS = Limits(Limit(1e9, "copy", {}), {})
PATHS = os.pathsep.join(map(str, (ROOT / "tools", ROOT)))

TESTS = """
import os, time
import pytest
from first_gpu import plugin

pytestmark = pytest.mark.gpu
dead = []
plugin.error_of_context = lambda: dead[0] if dead else None

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    if number == 2:
        dead.append("CUDA error: an illegal memory access was encountered")
    if number == 4:
        os.kill(os.getpid(), 9)
    if number == 6:
        time.sleep(60)
    if number == 8:
        assert number == 9
    if number == 10:
        pytest.skip("no such kernel")
"""


def run(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Run ``TESTS`` on two processes; return a row for each number."""
    (folder / "test_planted.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    rows = folder / "rows.jsonl"
    command = [*first_gpu._pytest(SimpleNamespace(rows=rows), ["test_planted.py"])]  # type: ignore[arg-type]
    command += ["-n", "2", "--max-worker-restart", "10", "--gpu-hang", "3", *options]
    subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PATHS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return {row["test"].split("[")[1].rstrip("]"): row for row in first_gpu.read(rows)}


@pytest.mark.ci
def test_a_test_that_ends_or_blocks_its_process_costs_itself_alone(tmp_path: Path) -> None:
    rows = run(tmp_path)
    outcomes = {number: row["outcome"] for number, row in rows.items()}
    expected = dict.fromkeys(map(str, range(12)), "passed")
    assert outcomes == expected | {
        **dict.fromkeys(("2", "4", "6"), "crashed"),
        "8": "failed",
        "10": "skipped",
    }
    assert rows["8"]["error"] == "assert 8 == 9" and "no such kernel" in rows["10"]["error"]


@pytest.mark.ci
def test_what_time_does_not_reach_is_skipped_and_said(tmp_path: Path) -> None:
    rows = run(tmp_path, "--gpu-until", str(time.time()))
    assert {(row["outcome"], row["error"]) for row in rows.values()} == {
        ("skipped", "Skipped: not reached")
    }


@pytest.mark.parametrize("error", [None, "CUDA error: an illegal memory access was encountered"])
def test_an_error_that_stays_is_one_of_the_context(
    error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if error:
            raise RuntimeError(f"{error}\nmore")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert plugin.error_of_context() == error


def test_a_summary_counts_outcomes_and_joins_equal_errors(tmp_path: Path) -> None:
    rows = [
        {"test": "a", "outcome": "passed", "error": ""},
        {"test": "b", "outcome": "failed", "error": "it is wrong"},
        {"test": "c", "outcome": "failed", "error": "it is wrong"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "test.jsonl").write_text(lines + '{"test": "cut of')
    page = first_gpu.summary(tmp_path)
    assert "## test: 2 failed, 1 passed" in page and "* failed, 2 times: it is wrong; b" in page


def test_a_call_without_a_gpu_builds_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    commands: list[Any] = []
    monkeypatch.setattr(first_gpu.Results, "run", lambda self, *args: commands.append(args[0]))
    monkeypatch.setattr(
        first_gpu.subprocess, "run", lambda command, **_: fresh_process.run(command[-1])
    )
    monkeypatch.setattr(sys, "argv", ["first_gpu", "test", str(tmp_path)])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert first_gpu.main() == 2
    assert commands == [[sys.executable, "setup.py", "build_ext", "--inplace"]]
    assert "torch sees no GPU here: nothing is run" in capsys.readouterr().out


def test_every_figure_is_of_an_op_at_a_size_that_it_can_be_made_in() -> None:
    for figure in figure_list.FIGURES.values():
        if figure.op != figure_list.OPTIMIZER:
            make = all_specs()[figure.op].bench_case
            assert make is not None and make(*figure.sizes).bytes_forward(torch.bfloat16) > 0
    names = [name for group in figure_list.groups().values() for name in group]
    assert sorted(names) == sorted(figure_list.FIGURES)


def test_a_figure_has_its_rows_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "measure_limits", lambda *_: LIMITS)
    settings = figures.settings_of(torch.device("cpu"), TimingPlan(least=3, most=3, seconds=0.01))

    def measured(op: str, *sizes: int, mark: tuple[str, float]) -> dict[str, Any]:
        return figures.measured(figure_list.Figure("group", op, sizes, (), mark), settings)

    result = measured("rms_norm", 16, 64, mark=("limit", 0.5))
    assert result["outcome"] == "passed"
    assert [row["direction"] for row in result["rows"]] == ["forward", "backward", "both"]
    first = result["rows"][0]
    assert first["of_mark"] == pytest.approx(first["limit_share"] / 0.5)
    assert figure_list.words(first).startswith("rms_norm 16x64 forward: ")
    (row,) = measured("optimizer", 2, 64, mark=("eager", 2.0))["rows"]
    assert row["rival"] == "eager" and row["of_mark"] == pytest.approx(row["lead"] / 2.0)
    (row,) = measured("attention_decode", 2, 4, 4, 64, 16, mark=("limit", 1.0))["rows"]
    assert row["direction"] == "forward", "it has no gradient"
    wrong = measured("rms_norm", 16, mark=("limit", 1.0))
    assert wrong["outcome"] == "failed" and wrong["error"].startswith("TypeError: ")


def test_what_users_run_comes_first_and_bfloat16_before_other_dtypes() -> None:
    def stage(file: str, name: str) -> int:
        return plugin._stage(SimpleNamespace(path=Path(file), name=name))  # type: ignore[arg-type]

    assert stage("test_hot_configurations.py", "test_values[x]") == 0
    assert stage("test_gpu_behaviour.py", "test_bits[x]") == 3
    runs = ("triton-cuda-bfloat16", "cuda-cuda-float32", "torch-cuda-float32")
    values = "test_values_and_gradients_match_float64"
    stages = [stage("test_all_ops.py", f"{values}[{run}-x]") for run in runs]
    assert stages == [0, 1, 2]


IMPORTS = """
import sys
for name in {missing}:
    sys.modules[name] = None
import first_gpu.__main__, first_gpu.figures, first_gpu.plugin
from fusedops.terminal.progress import steps
with steps(1) as progress:
    progress.advance()
"""


def test_torch_triton_and_pytest_are_enough() -> None:
    fresh_process.run(IMPORTS.format(missing=MISSING), check=True, PYTHONPATH=PATHS)


def test_all_files_with_tests_for_a_gpu_are_found() -> None:
    files = first_gpu.gpu_files()
    assert "tests/ops/test_all_ops.py" in files and "tests/parallel/test_gpu.py" in files
    assert "tests/core/test_lints.py" not in files


def test_a_fake_lies_in_memory_as_its_tensor_does() -> None:
    """Triton compiles another kernel for an address that 16 bytes do not divide."""
    pytest.importorskip("triton")
    import fake_gpu

    memory = torch.empty(12, 42, dtype=torch.bfloat16)
    parts = (memory, *memory.chunk(2, -1))
    with FakeTensorMode():
        fakes = [fake_gpu._fake(part) for part in parts]
        addresses = [fake_gpu.mocked(fake).data_ptr() % 16 for fake in fakes]
    assert addresses == [0, 0, 42 % 16]
    assert [fake.stride() for fake in fakes] == [(42, 1)] * 3
