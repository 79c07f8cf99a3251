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
from gpt2_demo.corpus import Corpus
from gpt2_demo.options import DEFAULTS
from gpt2_demo.training import STOCK, Contender, Settings

from fusedops.terminal.files import UserError

SCRIPT = Path(train_gpt2.__file__)
# The limit is none: on a busy machine the default one cuts steps.
SMALL = (
    "--layers 2 --hidden 64 --batch 2 --seq-len 64 --vocab 400 --steps 20 --more-steps 3 "
    "--time-limit 3600"
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


@pytest.fixture
def canned(results: report.Results, monkeypatch: pytest.MonkeyPatch) -> report.Results:
    monkeypatch.setattr(train_gpt2, "run", lambda options, console: results)
    return results


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--steps", "0", r"--steps: must be a whole number from 1 .* got '0'"),
        ("--steps", "many", r"--steps: must be a whole number .* got 'many'"),
        ("--layers", "-1", r"--layers: must be a whole number from 1 .* got '-1'"),
        ("--hidden", "100", r"--hidden: must be a multiple of 64, got 100"),
        ("--vocab", "10", r"--vocab: must be a whole number from 300 .* got '10'"),
        ("--seq-len", "1", r"--seq-len: must be a whole number from 8 .* got '1'"),
        ("--dtype", "int8", r"--dtype: invalid choice: 'int8'"),
        ("--device", "tpu", r"--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        ("--device", "cpu:0", r"--device: must be cpu, cuda or cuda:N, got 'cpu:0'"),
        ("--device", "cuda:99", r"--device: cuda:99 was asked for, but torch sees \d+ GPUs"),
        ("--seed", "-3", r"--seed: must be a whole number from 0 .* got '-3'"),
        ("--nonsense", "1", r"unrecognized arguments: --nonsense 1"),
    ],
)
def test_nonsense_options_are_named(option: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train_gpt2.parse_options([option, value])


def test_options_are_completed_for_the_device() -> None:
    options = train_gpt2.parse_options(["--device", "cpu", "--layers", "3"])
    defaults = DEFAULTS["cpu"]
    assert (options.layers, options.hidden, options.steps) == (3, defaults.hidden, defaults.steps)


def exit_of_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that ``main`` says before it exits with code 2."""
    with pytest.raises(SystemExit) as stopped:
        train_gpt2.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_missing_corpus_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(options: object, console: object) -> None:
        train_gpt2.load_corpus(
            train_gpt2.Source(options.corpus, options.out, 400, 1000, 16, 0)  # type: ignore[attr-defined]
        )

    monkeypatch.setattr(train_gpt2, "run", read_only)
    line = exit_of_main(["--corpus", str(tmp_path / "none"), "--out", str(tmp_path)], capsys)
    assert "none does not exist" in line


@pytest.mark.parametrize("out", ["/proc/nowhere", "/dev/null/out"])
def test_output_that_cannot_be_made_is_said_before_training(
    out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt2, "run", None)
    assert out in exit_of_main(["--out", out], capsys)


def test_folder_in_the_place_of_a_file_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt2, "run", None)
    (tmp_path / "demo.png").mkdir()
    assert "demo.png: it is a folder" in exit_of_main(["--out", str(tmp_path)], capsys)


def test_full_disk_leaves_the_old_files_whole(
    canned: report.Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("demo.json", "demo.png"):
        (tmp_path / name).write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    line = exit_of_main(["--out", str(tmp_path)], capsys)
    assert "No space left on device" in line and "demo.json" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "demo.json", "demo.png"]
    assert (tmp_path / "demo.json").read_text() == (tmp_path / "demo.png").read_text() == "old"


def test_files_hold_what_was_measured(
    canned: report.Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_gpt2.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["device"] == "cpu"
    assert [(row["dtype"], row["model"], row["allocator"]) for row in record["rows"]] == [
        ("float32", "stock", "system"),
        ("float32", "fusedops", "system"),
        ("float32", "stock", "tuned"),
        ("float32", "fusedops", "tuned"),
        ("bfloat16", "stock", "tuned"),
        ("bfloat16", "fusedops", "tuned"),
    ]
    for row in record["rows"]:
        seconds = row["step_seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(2 * 16 / seconds)
    comparison = record["comparisons"][0]
    assert comparison["losses"] == canned.tuned[0].losses
    assert comparison["largest_loss_difference_first_20"] == 0.0
    assert (tmp_path / "demo_sample.txt").read_text() == "def f():\n    pass\n"
    png = (tmp_path / "demo.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 800 and height > 600
    shown = capsys.readouterr().out
    for name, loss in canned.tuned[0].validation_losses.items():
        assert f"{loss:.4f}" in shown, name
    assert "def f():" in shown


def test_json_on_stdout_is_the_file(
    canned: report.Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_gpt2.main(["--device", "cpu", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "demo.json").read_text())


def test_losses_that_differ_fail_the_demo(
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


def test_a_gap_after_the_compared_steps_is_no_failure(results: report.Results) -> None:
    first = results.tuned[0]
    longer = {name: losses * 3 for name, losses in first.losses.items()}
    longer["fusedops"][training.COMPARED] *= 1.01
    assert report.losses_agree(replace(results, tuned=[replace(first, losses=longer)]))


@pytest.mark.slow
def test_whole_run(corpus_directory: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), *SMALL.split(), "--json", "--device", "cpu"),
            *("--corpus", str(corpus_directory), "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
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


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_in_one_sentence(corpus_directory: Path, tmp_path: Path) -> None:
    # A file-size limit of the process is the disk that no test can fill; its signal is ignored.
    program = (
        "import resource, runpy, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]);"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, str(SCRIPT), *SMALL.split(), "--device", "cpu"),
            *("--corpus", str(corpus_directory), "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write" in done.stderr.strip().splitlines()[-1]
    assert list((tmp_path / "out" / "cache").iterdir()) == []
