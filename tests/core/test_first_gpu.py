"""The first hour on a GPU: errors that end or block a process cost one test; and its figures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh_process
import pytest
import torch
from first_gpu import __main__ as first_gpu
from first_gpu import figure_list, figures
from test_collection import MISSING

from fusedops.bench.contenders import peers_of
from fusedops.bench.limits import Limit, Limits
from fusedops.bench.results import COMPILE
from fusedops.runtime.timer import TimingPlan
from fusedops.specs import all_specs

ROOT = Path(__file__).resolve().parents[2]
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


def run(folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``TESTS`` on two processes; return a row for each number."""
    (folder / "test_planted.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    rows = folder / "rows.jsonl"
    command = [*first_gpu._pytest(SimpleNamespace(rows=rows), ["test_planted.py"])]  # type: ignore[arg-type]
    command += ["-n", "2", "--max-worker-restart", "10", "--gpu-hang", "3"]
    silent = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": PATHS}, **silent)  # type: ignore[call-overload]
    return {row["test"].split("[")[1].rstrip("]"): row for row in first_gpu.read(rows)}


@pytest.mark.slow
def test_a_test_that_ends_or_blocks_its_process_costs_itself_alone(tmp_path: Path) -> None:
    rows = run(tmp_path)
    outcomes = {number: row["outcome"] for number, row in rows.items()}
    expected = dict.fromkeys(map(str, range(12)), "passed")
    expected |= dict.fromkeys(("2", "4", "6"), "crashed")
    assert outcomes == expected | {"8": "failed", "10": "skipped"}
    assert rows["8"]["error"] == "assert 8 == 9" and "no such kernel" in rows["10"]["error"]


def test_every_figure_is_of_an_op_at_a_size_that_it_can_be_made_in() -> None:
    for figure in figure_list.FIGURES.values():
        if figure.op != figure_list.OPTIMIZER:
            make = all_specs()[figure.op].bench_case
            assert make is not None and make(*figure.sizes).bytes_forward(torch.bfloat16) > 0


def test_every_rival_of_a_figure_is_one_that_the_benchmark_has_for_the_op() -> None:
    for figure in figure_list.FIGURES.values():
        assert set(figure.rivals) <= {COMPILE, *peers_of(figure.op)}, figure.name
    assert sum("liger" in figure.rivals for figure in figure_list.FIGURES.values()) == 9


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
    assert "tests/core/test_mutations.py" not in files
