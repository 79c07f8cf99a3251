"""``fusedops train`` from the command line: what is wrong is one line, and exit code 2."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import invoke

from fusedops.cli import train_run
from fusedops.launch.config_table import override
from fusedops.models import ParallelConfig, Transformer, load_huggingface, preset, save_huggingface
from fusedops.train import load_config, loop
from fusedops.train.config import Config, DataConfig

GOOD = """
out = "{folder}/run"
steps = 2
batch = 2
device = "cpu"
tune_host = false
model = {{ preset = "tiny-gpt2" }}
log = {{ peak_tflops = 1.0 }}
data = {{ train = ["{folder}/text.txt"], seq_len = 16 }}
"""


train = partial(invoke, "train")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("one and two is three. " * 40)
    path = tmp_path / "train.toml"
    path.write_text(GOOD.format(folder=tmp_path))
    return str(path)


def test_a_run_tells_how_it_went(file: str) -> None:
    done = train(file)
    assert done.exit_code == 0, done.output
    first, *_, last = done.output.splitlines()
    assert "1 process on cpu" in first and last.startswith("done: 2 steps, loss 5.")
    again = train(file)
    assert again.exit_code == 0 and "all 2 steps were done before" in again.output


def test_more_processes_than_cores_are_said(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("fusedops.launch.job.join_job", lambda: None)
    monkeypatch.setattr("fusedops.train.launch", lambda number, *_, **__: started.append(number))
    said = "3 processes share the 2 cores"
    assert said in train(file, "--processes", "3").output
    assert said not in train(file, "--processes", "2").output and started == [3, 2]


def test_the_example_has_every_key_and_its_default(tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    assert train("--example", str(path)).exit_code == 0
    written = load_config(path)
    data = DataConfig(train=written.data.train)
    bare = asdict(Config(out=written.out, steps=written.steps, batch=written.batch, data=data))
    defaults = {"": bare, **{key: table for key, table in bare.items() if isinstance(table, dict)}}
    defaults["parallel"] = asdict(ParallelConfig())
    stated: dict[str, set[str]] = {table: set() for table in defaults}
    table = ""
    for line in path.read_text().splitlines():
        table = line[1 : line.index("]")] if line.startswith("[") else table
        match = re.fullmatch(r"(\w+) = (.+?)(?: *# .*?(?:default: (\S+))?)?", line)
        if match and table != "model":
            key, value, default = match.groups()
            stated[table].add(key)
            value = override({}, [f"value={default or value}"])["value"]
            value = tuple(value) if isinstance(value, list) else value
            assert value == defaults[table][key], f"{table}.{key}: {line}"
    assert all(
        stated[name] == set(defaults[name]) for name in {*defaults} - {"", "parallel", "model"}
    )


def test_a_checkpoint_of_hugging_face_comes_in_and_goes_out(file: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_huggingface(Transformer(replace(preset("tiny-llama"), vocab_size=320)), first)
    more = ("--set", f"model={{ load = '{first}' }}", "--set", "optimizer.lr=1e-3")
    done = train(file, *more, "--set", f"export={second}")
    assert done.exit_code == 0, done.output
    before, after = load_huggingface(first), load_huggingface(second)
    assert before.config == after.config
    moved = [
        float((one - other).detach().abs().max())
        for one, other in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert 0 < max(moved) < 3e-3  # two steps of about the learning rate
    refused = train(file, *more, "--set", "model.num_layers=1", "--set", f"out={tmp_path}/b")
    assert refused.exit_code == 2 and "no other key with load" in refused.output


def test_more_memory_than_the_machine_has_is_refused_before_the_first_step(file: str) -> None:
    done = train(file, "--set", "batch=99999999999")
    assert done.exit_code == 2, done.output
    (line,) = done.output.splitlines()
    assert "a step takes an estimated " in line and " TiB of memory in each process" in line
    assert "make batch smaller" in line


def test_an_estimate_above_the_memory_is_a_warning(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_run, "available_bytes", lambda: 1000)
    done = train(file)
    assert done.exit_code == 0, done.output
    assert "and 1000 B is available, which may not be enough" in done.output


def out_of_gpu_memory(request: str, unallocated: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {request}. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.00 GiB is free. 60.00 GiB is allocated by PyTorch, and "
        f"{unallocated} is reserved by PyTorch but unallocated."
    )


# The error, and the free bytes in pieces that are larger than what was asked for.
EXHAUSTED: dict[str, tuple[Exception | None, str]] = {
    "host": (None, ""),
    "python": (MemoryError(), ""),
    "gpu": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), ""),
    "in pieces": (out_of_gpu_memory("2.00 GiB", "12.50 GiB"), "12.50 GiB"),
    "too little in pieces": (out_of_gpu_memory("2.00 GiB", "900.00 MiB"), ""),
    "MiB in pieces": (out_of_gpu_memory("0.50 GiB", "900.00 MiB"), "900.00 MiB"),
}


@pytest.mark.parametrize(("error", "pieces"), EXHAUSTED.values(), ids=EXHAUSTED)
def test_exhausted_memory_is_one_line(
    file: str, monkeypatch: pytest.MonkeyPatch, error: Exception | None, pieces: str
) -> None:
    def update(*_: Any, **__: Any) -> None:
        if error is not None:
            raise error
        torch.empty(1 << 50)

    monkeypatch.setattr(loop, "update", update)
    done = train(file)
    assert done.exit_code == 1, done.output
    says = f"{pieces} are free, in pieces" if pieces else "a step takes an estimated "
    assert done.output.splitlines()[-1].startswith(f"fusedops: error: out of memory: {says}")


LAYOUT = {"dp": 2, "tp": 1, "micro_batch": 1, "microbatches": 2, "optimizer_overlap": True}
PLANS: dict[str, tuple[Any, str]] = {
    "no table": ([LAYOUT], "has no layout that fits"),
    "no list": ({"layouts": 5}, "has no layout that fits"),
    "layout is a list": ({"layouts": [{"layout": [2]}]}, "has no layout that fits"),
    "unknown key": (LAYOUT | {"microbatch": 1}, "unknown key 'microbatch' in [layout]: did you"),
    "type": (LAYOUT | {"dp": "2"}, "dp must be an int, got str"),
    "type of a shape": (LAYOUT | {"micro_batch": 0.5}, "micro_batch must be an int, got float"),
    "range": (LAYOUT | {"zero": 7}, "zero must be"),
    **{
        f"no {name}": ({key: LAYOUT[key] for key in LAYOUT if key != name}, f"layout.{name} is m")
        for name in ("dp", "micro_batch", "microbatches")
    },
}


@pytest.mark.parametrize(("plan", "says"), PLANS.values(), ids=PLANS)
def test_a_plan_that_was_edited_wrongly_is_one_line(
    file: str, tmp_path: Path, plan: Any, says: str
) -> None:
    path = tmp_path / "plan.json"
    edited = {"layouts": [{"layout": plan}]} if "tp" in plan else plan
    path.write_text(json.dumps(edited))
    done = train(file, "--plan", str(path))
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert done.output.startswith(f"fusedops: error: {path}") and says in done.output


def test_a_plan_sets_the_batch_and_the_parallel_sizes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layouts": [{"fits": False}, {"layout": LAYOUT}]}))
    assert set(train_run.assignments(path)) == {
        "batch=4",
        "parallel.dp=2",
        "parallel.microbatches=2",
        'parallel.recompute="none"',
        "parallel.tp=1",
    }
