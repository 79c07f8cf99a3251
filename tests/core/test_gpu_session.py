"""What runs on a GPU that is lent for half an hour: order, shards, records, the script's steps."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import gpu_order
import gpu_session
import merge_tables
import pytest
import warm_kernels

from fusedops._core import tuning
from fusedops.specs import all_specs

ROOT = Path(__file__).resolve().parents[2]


def test_important_ops_come_first_and_every_op_in_the_first_dtype() -> None:
    assert set(gpu_order.FIRST) <= set(all_specs()), "an op of the list is gone"
    jobs = gpu_order.ordered(["moe_sort", "attention", "rms_norm"], ("bfloat16", "float32"))
    assert jobs[:3] == [
        ("rms_norm", "bfloat16"),
        ("attention", "bfloat16"),
        ("moe_sort", "bfloat16"),
    ]
    assert jobs[3:] == [(op, "float32") for op, _ in jobs[:3]]


def test_every_op_is_in_one_shard_and_each_begins_with_important_ones() -> None:
    for shards in (1, 2, 4):
        found = {op: gpu_order.shard_of(op, shards) for op in all_specs()}
        assert set(found.values()) == set(range(shards))
        assert [found[op] for op in gpu_order.FIRST[:shards]] == list(range(shards))
    assert gpu_order.parse_shard("2/4") == (1, 4)
    for text in ("0/4", "5/4", "1", "a/b", "1/0"):
        with pytest.raises(ValueError, match="K/N"):
            gpu_order.parse_shard(text)


# Stands for the tests of ops on a GPU: names as theirs, outcomes of every kind.
TESTS = """
import types
import pytest

SPECS = [types.SimpleNamespace(name=name) for name in ("moe_sort", "rms_norm", "attention")]
by_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@by_spec
def test_other(spec):
    pass


@by_spec
@pytest.mark.parametrize("run", ["torch-cuda-float32", "cuda-cuda-float32", "triton-cuda-bfloat16"])
def test_values_and_gradients_match_float64(spec, run):
    if run.startswith("cuda") and spec.name == "attention":
        pytest.skip("no <kernel>")
    assert (spec.name, run) != ("moe_sort", "triton-cuda-bfloat16"), "wrong & \\x00 bad"
    if STOP and spec.name == "attention" and run.startswith("torch"):
        import os
        os._exit(9)
"""


def session(folder: Path, *arguments: str, stop: bool = False) -> Path:
    (folder / "test_all_ops.py").write_text(TESTS.replace("STOP", str(stop)))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "gpu_session", "-p", "no:cacheprovider"]
        + [str(folder), "--rootdir", str(folder), "--record", str(folder / "out"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        cwd=folder,
    )
    return folder / "out"


def rows(path: Path) -> list[tuple[str, str]]:
    with path.open(newline="") as file:
        return [(row["test"].rpartition("::")[2], row["outcome"]) for row in csv.DictReader(file)]


def test_values_come_first_and_every_outcome_is_recorded(tmp_path: Path) -> None:
    out = session(tmp_path)
    found = rows(out / "test-gpu.csv")
    name = "test_values_and_gradients_match_float64"
    assert found[:3] == [
        (f"{name}[triton-cuda-bfloat16-rms_norm]", "passed"),
        (f"{name}[triton-cuda-bfloat16-attention]", "passed"),
        (f"{name}[triton-cuda-bfloat16-moe_sort]", "failed"),
    ]
    assert found[4] == (f"{name}[cuda-cuda-float32-attention]", "skipped")
    assert [test for test, _ in found[-3:]] == [
        f"test_other[{op}]" for op in ("rms_norm", "attention", "moe_sort")
    ]
    cases = ElementTree.parse(out / "test-gpu.xml").findall(".//testcase")
    assert len(cases) == len(found) == 12
    (failure,) = [each for case in cases for each in case.findall("failure")]
    assert "wrong & " in (failure.text or "")
    assert sum(len(case.findall("skipped")) for case in cases) == 1


def test_a_session_that_dies_has_recorded_what_ran(tmp_path: Path) -> None:
    out = session(tmp_path, stop=True)
    found = rows(out / "test-gpu.csv")
    cases = ElementTree.parse(out / "test-gpu.xml").findall(".//testcase")
    assert len(cases) == len(found) == 7, "six of the first stages and one of the third"


def test_shards_are_disjoint_and_complete(tmp_path: Path) -> None:
    found = []
    for shard in ("1/2", "2/2"):
        out = session(tmp_path, "--shard", shard)
        part = [test for test, _ in rows(out / f"test-gpu-{shard.replace('/', 'of')}.csv")]
        assert part
        found += part
    assert len(found) == len(set(found)) == 12


def test_jobs_that_fail_or_that_time_does_not_reach_end_nothing() -> None:
    said = []

    def work(op: str, dtype: str) -> warm_kernels.Warmed:
        if op == "attention":
            raise RuntimeError("no memory")
        return warm_kernels.Warmed(op, dtype, kernels=2)

    jobs = gpu_order.ordered(["swiglu", "attention"], ("bfloat16",))
    left = warm_kernels.warm_all(jobs, work, ThreadPoolExecutor(1), said.append, 60)
    assert left == 0
    assert {each.op: (each.kernels, each.failed) for each in said} == {
        "swiglu": (2, 0),
        "attention": (0, 1),
    }
    assert warm_kernels.warm_all(jobs, work, ThreadPoolExecutor(1), said.append, -1) >= 0


def test_tables_of_single_ops_become_one() -> None:
    def table(op: str, architecture: str = "sm_90") -> tuning.Table:
        entry = SimpleNamespace(op=op)
        return tuning.Table(architecture, {"torch": "2"}, (entry,))  # type: ignore[arg-type]

    merged = merge_tables.merge([table("gelu"), table("swiglu")])
    assert [entry.op for entry in merged.entries] == ["gelu", "swiglu"]
    with pytest.raises(ValueError, match="one architecture"):
        merge_tables.merge([table("gelu"), table("gelu", "sm_80")])
    with pytest.raises(ValueError, match="none"):
        merge_tables.merge([])


# Stands for python3 on the machine with the GPU: tells what it was asked, writes what is asked for.
PYTHON = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  tools/gpu_order.py) printf 'rms_norm\\nattention\\n' ;;
  *"bench tune"*attention*) exit 3 ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --out | --json) echo '{}' > "$2" ;;
    --results) mkdir -p "$2/gpu" && echo row > "$2/gpu/row.csv" ;;
    --record) mkdir -p "$2" && echo '<testsuites/>' > "$2/test-gpu.xml" ;;
  esac
  shift
done
"""


def first_gpu(tmp_path: Path, step: str, **environment: str) -> tuple[int, list[str], Path]:
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "tools" / "first_gpu.sh", step, out],
        env={**os.environ, "PYTHON": str(python), "CALLS": str(calls), **environment},
        capture_output=True,
    )
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], out


def test_the_first_call_builds_compiles_and_tests_in_this_order(tmp_path: Path) -> None:
    code, calls, out = first_gpu(tmp_path, "test")
    assert code == 0
    wanted = (
        "setup.py build_ext --inplace",
        "tools/warm_kernels.py",
        "-m pytest -q -p gpu_session",
    )
    assert [call.startswith(start) for call, start in zip(calls, wanted, strict=True)] == [True] * 3
    assert (out / "test-gpu.xml").exists()
    assert "tests: exit code 0" in (out / "test.log").read_text()


def test_the_second_call_measures_ops_by_importance_and_packs_what_it_has(tmp_path: Path) -> None:
    code, calls, out = first_gpu(tmp_path, "bench")
    assert code == 0
    measured = [call.split()[3] for call in calls if "cli.main bench" in call]
    assert measured == ["rms_norm", "attention"]
    assert (out / "results.tar.gz").exists() and (out / "records.tar.gz").exists()


def test_the_third_call_goes_on_after_an_op_that_fails_and_says_so(tmp_path: Path) -> None:
    code, calls, out = first_gpu(tmp_path, "tune")
    assert code == 1
    tuned = [call.split()[5] for call in calls if "bench tune" in call]
    assert tuned == ["rms_norm", "attention"]
    assert sum("merge_tables" in call for call in calls) == 1
    assert (out / "tables" / "rms_norm.json").exists()
    assert "tune attention: exit code 3" in (out / "tune.log").read_text()


def test_without_time_nothing_starts_and_a_wrong_step_is_refused(tmp_path: Path) -> None:
    code, calls, out = first_gpu(tmp_path, "test", SECONDS_HERE="0")
    assert (code, calls) == (1, [])
    assert "no time left" in (out / "test.log").read_text()
    assert first_gpu(tmp_path, "dance")[0] == 2
    assert gpu_session.op_of(SimpleNamespace(path=Path("tests/ops/test_gelu.py"))) == "gelu"  # type: ignore[arg-type]
