"""The demo as a command: its options, its files, its exit codes, and one sentence for bad input."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_gpt2
from gpt2_demo import report, training
from gpt2_demo.corpus import Corpus, Source
from gpt2_demo.training import STOCK, Contender, Settings

# The limit is none: on a busy machine the default one cuts steps.
SMALL = (
    "--layers 2 --hidden 64 --batch 2 --seq-len 64 --vocab 400 --steps 20 --more-steps 3 "
    "--time-limit 3600 --device cpu"
)


@pytest.fixture(scope="session")
def results(corpus: Corpus, settings: Settings) -> report.Results:
    """What a run finds, from two stock models of which one bears the fused model's name."""
    few = replace(settings, steps=8, validation_batches=1)
    twins = (STOCK, Contender("fusedops", lambda model: None))
    comparisons = []
    for dtype in ("float32", "bfloat16"):
        comparison, trainers = training.compare(twins, corpus, few, dtype)
        training.inspect(comparison, trainers, corpus)
        comparisons.append(comparison)
    untuned, _ = training.compare(twins, corpus, replace(few, steps=5), "float32")
    return report.Results(
        corpus="some files",
        parameters=1234,
        settings=few,
        tuned=comparisons,
        untuned=[untuned],
        allocator="tuned",
        tuning="done: allocator: so",
        sample="def f():\n    pass",
        sample_steps=8,
    )


def exit_of_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that ``main`` says before it exits with code 2."""
    with pytest.raises(SystemExit) as stopped:
        train_gpt2.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--steps 0", "--steps: must be a whole number from 1 to 1000000, got '0'"),
        ("--steps many", "--steps: must be a whole number from 1 to 1000000, got 'many'"),
        ("--hidden 100", "--hidden: must be a multiple of 64, got 100"),
        ("--dtype int8", "--dtype: invalid choice: 'int8'"),
        ("--device tpu", "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        ("--device cpu:0", "--device: must be cpu, cuda or cuda:N, got 'cpu:0'"),
        ("--device cuda:99", "--device: cuda:99 was asked for, but torch sees "),
        ("--nonsense 1", "unrecognized arguments: --nonsense 1"),
        ("--out /proc/nowhere", "/proc/nowhere"),
        ("--out /dev/null/out", "/dev/null/out"),
        ("--out taken", "demo.png: it is a folder"),
    ],
)
def test_a_mistake_is_said_before_training(
    arguments: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_gpt2, "run", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken" / "demo.png").mkdir(parents=True)
    assert said in exit_of_main(arguments.split(), capsys)


def test_files_hold_what_was_measured(
    results: report.Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_gpt2, "run", lambda options, console: results)
    command = ["--device", "cpu", "--out", str(tmp_path)]
    assert train_gpt2.main(command) == 0
    shown = capsys.readouterr().out
    assert "def f():" in shown
    for name, loss in results.tuned[0].validation_losses.items():
        assert f"{loss:.4f}" in shown, name
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["device"] == "cpu"
    kinds = (("float32", "system"), ("float32", "tuned"), ("bfloat16", "tuned"))
    assert [(row["dtype"], row["allocator"], row["model"]) for row in record["rows"]] == [
        (*kind, model) for kind in kinds for model in ("stock", "fusedops")
    ]
    for row in record["rows"]:
        seconds = row["step_seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(2 * 16 / seconds)
    assert record["comparisons"][0]["losses"] == results.tuned[0].losses
    assert record["comparisons"][0]["largest_loss_difference_first_20"] == 0.0
    assert (tmp_path / "demo_sample.txt").read_text() == "def f():\n    pass\n"
    png = (tmp_path / "demo.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 800 and height > 600
    assert train_gpt2.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "demo.json").read_text())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {path: path.read_bytes() for path in tmp_path.glob("demo*")}
    monkeypatch.setattr(os, "fsync", full)
    line = exit_of_main(command[2:], capsys)
    assert "No space left on device" in line and "demo.json" in line
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_losses_that_differ_within_the_compared_steps_fail_the_demo(
    results: report.Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = results.tuned
    losses = {**first.losses, "fusedops": [loss * 1.001 for loss in first.losses["fusedops"]]}
    wrong = replace(results, tuned=[replace(first, losses=losses), second])
    monkeypatch.setattr(train_gpt2, "run", lambda options, console: wrong)
    assert train_gpt2.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "float32 losses differ" in capsys.readouterr().err
    assert (tmp_path / "demo.json").exists()
    longer = {name: losses * 3 for name, losses in first.losses.items()}
    longer["fusedops"][training.COMPARED] *= 1.01
    assert report.losses_agree(replace(results, tuned=[replace(first, losses=longer)]))


@pytest.mark.slow
def test_whole_run(source: Source, tmp_path: Path) -> None:
    command = [sys.executable, train_gpt2.__file__, *SMALL.split(), "--json"]
    command += ["--corpus", str(source.directory), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert len(record["rows"]) == 8
    assert record["memory"]["same_losses"]
    assert "recomputed" in record["memory"]["activations"]
    assert all(row["tokens_per_second"] > 0 for row in record["rows"])
    tuned = [row for row in record["rows"] if row["allocator"] == "tuned"]
    assert all(row["peak_memory_bytes"] > 0 and row["validation_loss"] > 0 for row in tuned)
    assert record["sample"].startswith(train_gpt2.PROMPT)
    assert record["sample_steps"] == 23
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
