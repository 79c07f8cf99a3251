"""The first hour on a GPU: its parts, and a rehearsal of all of it with a GPU that does nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_cuda
import torch
from first_gpu import calls, figure_list, order, protocol, results, worker
from first_gpu.supervise import Row, Supervisor, Task
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops.specs import all_specs

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "ops"))  # fake_gpu


def test_small_ops_come_first_and_important_ones_among_equals() -> None:
    assert set(order.FIRST) <= set(all_specs()), "an op of the list is gone"
    sizes = {"attention": 600, "gelu": 130, "rms_norm": 140, "moe_sort": 10, "swiglu": 250}
    assert order.smallest_first(sizes) == ["moe_sort", "rms_norm", "swiglu", "gelu", "attention"]
    jobs = order.ordered(["moe_sort", "attention", "rms_norm"], ("bfloat16", "float32"))
    assert jobs[:3] == [(op, "bfloat16") for op in ("rms_norm", "attention", "moe_sort")]
    assert jobs[3:] == [(op, "float32") for op, _ in jobs[:3]]


# A process that does what its items say.
WORKER = """
import argparse, os, sys, time
from pathlib import Path
from first_gpu import protocol
import json

options = protocol.options(argparse.ArgumentParser())
events = protocol.Events(options.events)
blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
launch = Path(os.environ["FIRST_GPU_LAUNCH"])
for item in json.loads(options.items.read_text()):
    events.start(item)
    if "launch" in item:
        launch.write_text(json.dumps({"item": item, "kernel": "blocking " + blocking}))
    if "dead" in item:
        events.end(item, "crashed", error="CUDA error: " + item)
        sys.exit(protocol.DEAD_CONTEXT)
    if "signal" in item:
        os.kill(os.getpid(), 9)
    if "hang" in item:
        time.sleep(60)
    if "memory" in item:
        block = b"x" * (400 << 20)
        time.sleep(60)
    if "slow" in item:
        time.sleep(0.3)
    events.end(item, "passed")
"""


def task(name: str, items: list[str], **options: Any) -> Task:
    return Task(name, [sys.executable, "-c", WORKER], items, **{"item_seconds": 4.0, **options})


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs tasks: what came of each item, and how many were not reached."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))

    def run(*tasks: Task, processes: int = 2, seconds: float = 60) -> Any:
        rows: list[Row] = []
        supervisor = Supervisor(tmp_path, rows.append, memory=200 << 20)
        unreached = supervisor.run(tasks, processes, seconds)
        return rows, unreached

    return run


def outcomes(rows: list[Row]) -> dict[str, str]:
    return {row["item"]: row["outcome"] for row in rows}


def test_an_item_that_ends_its_process_costs_itself_alone(supervise: Any) -> None:
    rows, unreached = supervise(
        task("a", ["1", "dead context::2", "3", "signal::4", "5"]),
        task("b", ["6", "hang::7", "8"]),
        task("c", ["9", "memory::10", "11"]),
    )
    found = outcomes(rows)
    assert unreached == 0
    bad = {item for item, outcome in found.items() if outcome == "crashed"}
    assert bad == {"dead context::2", "signal::4", "hang::7", "memory::10"}
    assert set(found) - bad == {"1", "3", "5", "6", "8", "9", "11"}
    errors = {row["item"]: row.get("error") for row in rows if row["item"] in bad}
    assert errors["dead context::2"] == "CUDA error: dead context::2"
    assert "SIGKILL" in errors["signal::4"]
    assert "hung" in errors["hang::7"] and "memory" in errors["memory::10"]


def test_what_ended_a_process_runs_once_more_alone_with_blocking_launches(supervise: Any) -> None:
    rows, _ = supervise(
        task("a", ["launch::1", "dead launch::2", "3", "dead::4"], traced=True), processes=1
    )
    names = ["launch::1", "dead launch::2", "dead launch::2", "3", "dead::4", "dead::4"]
    assert [row["item"] for row in rows] == names
    traced = rows[2]
    assert traced["task"] == "a" and traced["outcome"] == "crashed"
    assert traced["blocking"] == "CUDA error: dead launch::2"
    assert rows[1]["launch"] == {"kernel": "blocking 0"}
    assert traced["launch"] == {"kernel": "blocking 1"}
    assert rows[-1]["launch"] is None, "the last launch was another item's"


def test_an_op_that_ends_too_many_processes_is_given_up(supervise: Any) -> None:
    rows, unreached = supervise(task("a", ["dead 1", "dead 2", "dead 3", "4"], most_ends=2))
    found = outcomes(rows)
    assert found == {
        "dead 1": "crashed",
        "dead 2": "crashed",
        "dead 3": "not run",
        "4": "not run",
    }
    assert unreached == 0


def test_a_heavy_task_makes_room_and_goes_on_behind_the_others(supervise: Any) -> None:
    heavy = task("heavy", [f"slow {n}" for n in range(8)], slice_seconds=0.7)
    rows, unreached = supervise(heavy, task("light", ["1"]), processes=1)
    names = [row["item"] for row in rows]
    assert unreached == 0 and len(names) == 9
    assert names.index("1") < 8  # first of all where the heavy one starts slowly


def test_time_that_is_over_ends_all_and_tells_what_was_not_reached(supervise: Any) -> None:
    started = time.monotonic()
    rows, unreached = supervise(
        task("a", ["1", "hang"], item_seconds=60), task("b", ["2"]), processes=1, seconds=2
    )
    assert time.monotonic() - started < 10
    assert outcomes(rows) == {"1": "passed"}
    assert unreached == 2


def test_a_process_that_does_not_begin_is_told_with_its_output(supervise: Any) -> None:
    broken = Task("broken", [sys.executable, "-c", "raise ValueError('no such thing')"], ["1"])
    rows, _ = supervise(broken)
    assert outcomes(rows) == {"process of broken": "crashed", "1": "not run"}
    assert "no such thing" in rows[0]["text"]


def test_the_first_process_that_claims_an_item_has_it(tmp_path: Path) -> None:
    assert protocol.claim(tmp_path, "gelu 1")
    assert not protocol.claim(tmp_path, "gelu 1")
    assert protocol.claim(tmp_path, "gelu 2")


@pytest.mark.parametrize("error", [None, "CUDA error: an illegal memory access was encountered"])
def test_an_error_that_stays_is_one_of_the_context(
    monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    def synchronize() -> None:
        if error is not None:
            raise RuntimeError(f"{error}\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert worker.error_of_context() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert worker.error_of_context() == error


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    text = protocol.shortened("a" * 5000 + "b" * 5000)
    assert len(text) < protocol.LONGEST_TEXT + 100
    assert text.startswith("aaa") and text.endswith("bbb") and "5904 characters" in text
    assert protocol.shortened("short") == "short"


def test_an_archive_has_what_comes_first_and_then_what_fits(tmp_path: Path) -> None:
    def file(name: str, size: int) -> Path:
        path = tmp_path / name
        path.write_bytes(os.urandom(size))
        return path

    first, small, large, last = (
        file("rows", 20_000),
        file("small", 10_000),
        file("large", 90_000),
        file("last", 5_000),
    )
    assert results.fitting([first], [small, large, last], 60_000) == [first, small, last]
    assert results.fitting([first], [], 10_000) == []


def test_results_are_whole_after_each_pack_and_the_last_row_of_an_item_counts(
    tmp_path: Path,
) -> None:
    out = results.Results("test", tmp_path / "out", tmp_path / "work")
    launch = {"kernel": "_k", "grid": [4], "constexprs": {"N": "8"}, "options": {}, "arguments": {}}
    out.add({"task": "gelu", "item": "t1", "outcome": "crashed", "error": "assert"})
    out.add(
        {"task": "gelu", "item": "t1", "outcome": "crashed", "error": "assert", "launch": launch}
    )
    out.add({"task": "swiglu", "item": "t2", "outcome": "passed"})
    out.step("done")
    out.pack()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"test.log", "test.tar.gz", "summary.md"}
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "gelu: assert; t1; last launch _k, grid [4]: N 8" in page
    assert "| gelu | 0 | 0 | 1 | 0 | 0 |" in page and "1 without a failure" in page
    with tarfile.open(tmp_path / "out" / "test.tar.gz") as archive:
        lines = archive.extractfile("rows.csv").read().decode().splitlines()  # type: ignore[union-attr]
    assert len(lines) == 3 and lines[1].endswith("assert,_k")


def test_every_figure_is_of_an_op_at_a_size_that_it_can_be_made_in() -> None:
    for figure in figure_list.FIGURES.values():
        if figure.op != "optimizer":
            make = all_specs()[figure.op].bench_case
            assert make is not None
            assert make(*figure.sizes, **figure.options).bytes_forward(torch.bfloat16) > 0
    names = [name for group in figure_list.groups().values() for name in group]
    assert sorted(names) == sorted(figure_list.FIGURES)
    assert list(figure_list.groups(["moe_mlp"])) == ["experts"]


def test_nothing_is_measured_without_the_compiled_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"gpu": "H200", "missing": {"libfusedops_cuda.so": "it does not exist"}}
    built: list[float] = []
    monkeypatch.setattr(calls.library, "describe", lambda: found)
    monkeypatch.setattr(calls.library, "build", lambda seconds, log: built.append(seconds))
    settings = calls.Settings(500, 1, 1, [], 1, 1, 1, {})
    out = results.Results("figures", tmp_path / "out", tmp_path / "work")
    assert not calls.Call("figures", settings, out).run()
    assert "not built: libfusedops_cuda.so: it does not exist" in out.steps
    assert "every figure would be wrong" in out.steps[-1]
    assert len(built) == 1 and min(built) > 400, "the call builds what is missing first"


def test_the_op_of_a_test_is_that_of_its_parameters_and_bfloat16_comes_first() -> None:
    def item(file: str, name: str, **parameters: Any) -> Any:
        return SimpleNamespace(
            path=Path(file), name=name, callspec=SimpleNamespace(params=parameters)
        )

    values = "test_values_and_gradients_match_float64"
    of_spec = item("test_all_ops.py", f"{values}[triton-cuda-bfloat16-x]", spec=all_specs()["gelu"])
    assert (worker.op_of(of_spec), worker.stage(of_spec)) == ("gelu", 0)
    by_name = item("test_gpu_behaviour.py", "test_bits[x]", op="gelu")
    assert (worker.op_of(by_name), worker.stage(by_name)) == ("gelu", 3)
    call = SimpleNamespace(op="attention")
    hot = item("test_hot_configurations.py", "test_values[x]", call=call)
    assert (worker.op_of(hot), worker.stage(hot)) == ("attention", 0)
    other = item("test_timer.py", "test_it")
    assert (worker.op_of(other), worker.stage(other)) == ("timer", 3)
    names = [f"{values}[{run}-x]" for run in ("cuda-cuda-float32", "torch-cuda-float32")]
    assert [worker.stage(item("test_all_ops.py", name)) for name in names] == [1, 2]


MISSING = (
    "click",
    "expecttest",
    "hypothesis",
    "matplotlib",
    "psutil",
    "rich",
    "transformers",
    "typer",
)
IMPORTS = """
import sys
for name in {missing}:
    sys.modules[name] = None
import first_gpu.__main__, first_gpu.figures, first_gpu.sanitized, first_gpu.warm
from fusedops.terminal.progress import steps
with steps(1) as progress:
    progress.advance()
"""


def test_torch_triton_and_pytest_are_enough() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(missing=MISSING)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tools'}:{ROOT}:{ROOT / 'tests' / 'ops'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_all_files_with_tests_for_a_gpu_are_found() -> None:
    found = calls.gpu_files()
    assert "tests/ops/test_all_ops.py" in found and "tests/parallel/test_gpu.py" in found
    assert "tests/core/test_contract.py" not in found


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


HITS = """
import json, sys
from first_gpu import stand_in, warm
stand_in.install_if_asked()
import torch
from triton import knobs
import fusedops
import hot_samples
from fusedops.specs import all_specs
from fusedops.specs.comparison import fresh, run

found = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append([src.name, cache_hit])
with fusedops.use_backend("triton"):
    for item in json.loads(sys.argv[1]):
        op, dtype, kind, number = item.split()
        if kind == "plain":
            run(all_specs()[op].op, fresh(warm.plain(op, getattr(torch, dtype))[int(number)]))
        else:
            call = warm.hot_calls(op, getattr(torch, dtype), 90)[int(number)]
            hot_samples.made(call, getattr(torch, dtype), torch.device("cpu")).run()
print(json.dumps(found))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the stand-in and an empty cache of Triton's."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the stand-in is for machines without")
    pytest.importorskip("triton")
    paths = [str(path) for path in (ROOT, ROOT / "tools", ROOT / "tests" / "ops")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_launches_find_in_the_cache_what_was_compiled_before(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["FIRST_GPU_STAND_IN"] = str(stand_in_cuda.build(tmp_path))
    items = ["rms_norm bfloat16 plain 0", "swiglu bfloat16 plain 1", "attention float16 plain 1"]
    items += [
        "linear_act bfloat16 plain 0",
        "attention bfloat16 hot 0",
        "grouped_mm bfloat16 hot 0",
    ]
    (tmp_path / "items").write_text(json.dumps(items))
    (tmp_path / "claims").mkdir()
    command = [sys.executable, "-m", "first_gpu.warm", "--capability", "90"]
    command += ["--multiprocessors", "132", "--claims", str(tmp_path / "claims")]
    command += ["--items", str(tmp_path / "items"), "--events", str(tmp_path / "events")]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["outcome"] for event in events if "end" in event] == ["passed"] * len(items)
    launched = subprocess.run(
        [sys.executable, "-c", HITS, json.dumps([*items, "swiglu float32 plain 0"])],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = json.loads(launched.stdout.splitlines()[-1])
    assert [hit for _, hit in found[:-2]] == [True] * (len(found) - 2) and len(found) > 8
    assert [hit for _, hit in found[-2:]] == [False, False], "what was not compiled before"


def first_gpu(
    folder: Path, environment: dict[str, str], call: str, planted: list[list[str]], **options: Any
) -> subprocess.Popen[str]:
    (folder / "planted.json").write_text(json.dumps(planted))
    settings = {"processes": 2, "compilers": 2, "work": folder / "work", **options}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    return subprocess.Popen(
        ["make", "first-gpu", f"CALL={call}", f"RESULTS={folder / 'out'}", f"PY={sys.executable}"]
        + [f"FLAGS={flags} --rehearse {folder / 'planted.json'}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def archived(folder: Path, call: str, name: str) -> str:
    with tarfile.open(folder / "out" / f"{call}.tar.gz") as archive:
        return archive.extractfile(name).read().decode()  # type: ignore[union-attr]


VALUES = "tests/ops/test_all_ops.py::test_values_and_gradients_match_float64"
PLANTED = {
    f"{VALUES}[triton-cuda-bfloat16-swiglu-wide]": "illegal access",
    f"{VALUES}[triton-cuda-float16-swiglu-wide]": "assert",
    f"{VALUES}[triton-cuda-float32-swiglu-wide]": "python",
    f"{VALUES}[triton-cuda-bfloat16-geglu-plain]": "hang",
    f"{VALUES}[triton-cuda-float16-geglu-plain]": "memory",
    f"{VALUES}[triton-cuda-float32-geglu-plain]": "signal",
}


# Stands for compute-sanitizer: runs the program, and finds something in one op.
SANITIZER = """#!/bin/bash
tool=$2
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" || exit
if [ "$tool" = memcheck ] && grep -q geglu "${@: -3:1}"; then
  echo "Invalid __global__ read of size 16 bytes"
  exit 99
fi
"""


@pytest.mark.slow
def test_a_rehearsal_of_all_calls_tells_each_error_and_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    planted = [[test, kind] for test, kind in PLANTED.items()]
    planted += [
        ["moe_sort bfloat16 plain 1", "compile"],
        ["triton-cuda-float32-moe_sort", "compile"],
    ]
    planted += [["swiglu 16384x14336", "illegal access"]]
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    environment["PATH"] = f"{tool.parent}:{environment['PATH']}"
    process = first_gpu(
        tmp_path,
        environment,
        "all",
        planted,
        ops="swiglu,geglu,moe_sort",
        item_seconds=20,
        memory=2.5,
    )
    log, _ = process.communicate()
    assert process.returncode != 0, "there are failures"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.md",
        *(f"{call}.{kind}" for call in calls.CALLS for kind in ("log", "tar.gz")),
    }
    rows = {row["item"]: row for row in results.read_rows(tmp_path / "work" / "test")}
    bad = {item: row for item, row in rows.items() if row["outcome"] not in ("passed", "skipped")}
    assert bad.pop("process of geglu-memcheck")["text"].count("Invalid __global__ read") == 1
    assert {rows[op]["outcome"] for op in ("swiglu", "geglu", "moe_sort")} == {"passed"}
    of_sort = {item for item in bad if "moe_sort" in item}
    assert set(bad) - of_sort == set(PLANTED), log
    words = {
        "illegal access": "illegal memory access",
        "assert": "device-side assert",
        "python": "TypeError: planted",
        "hang": "hung",
        "memory": "memory",
        "signal": "SIGSEGV",
    }
    for test, kind in PLANTED.items():
        assert words[kind] in bad[test]["error"]
        assert bad[test]["outcome"] == ("failed" if kind == "python" else "crashed")
        if kind in ("illegal access", "assert", "hang"):
            assert bad[test]["launch"]["kernel"] == "_forward_kernel"
            assert bad[test]["launch"]["constexprs"]["BLOCK"]
    assert "moe_sort bfloat16 plain 1" in of_sort, "one job of the warm-up is lost"
    assert all(bad[test]["outcome"] == "failed" for test in of_sort)
    ops = ("swiglu", "geglu", "moe_sort")
    passed = [item for item, row in rows.items() if row["outcome"] == "passed"]
    assert all(sum(f"-{op}-" in test for test in passed) > 20 for op in ops)
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "an illegal memory access" in page and "last launch _forward_kernel, grid" in page
    assert "| geglu 16384x14336 | forward |" in page, "the figure behind the one that failed"
    assert "swiglu 16384x14336" in archived(tmp_path, "figures", "rows.csv")
    assert "geglu 16384x14336" in archived(tmp_path, "figures", "figures.csv")
    assert len(json.loads(archived(tmp_path, "figures", "figures.json"))) == 2
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert max(sizes) < results.LARGEST_ARCHIVE


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_call_that_is_cut_off_has_told_what_was_done(
    tmp_path: Path, environment: dict[str, str], number: int
) -> None:
    process = first_gpu(
        tmp_path,
        environment,
        "test",
        [["[triton-cuda-float32-moe_sort-several_tasks", "hang"]],
        ops="moe_sort",
        item_seconds=500,
    )
    archive = tmp_path / "out" / "test.tar.gz"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        rows = archived(tmp_path, "test", "rows.csv") if archive.exists() else ""
        if f"{VALUES}[triton-cuda-float32-moe_sort-random_12x2_of_4" in rows:
            break
        time.sleep(0.5)
    else:
        pytest.fail("no row of a test that was done is in the archive")
    (caller,) = children(process.pid)
    workers = children(caller)
    assert workers
    os.kill(caller, number)
    process.communicate()
    assert "moe_sort" in archived(tmp_path, "test", "rows.csv")
    if number == signal.SIGTERM:
        assert "stopped by SIGTERM" in (tmp_path / "out" / "summary.md").read_text()
    time.sleep(1)
    assert not [pid for pid in workers if alive(pid)], "no process stays on the GPU"


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
