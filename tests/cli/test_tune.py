"""``fusedops bench tune`` from the command line, and how it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fusedops._core import backends, extension, tuning
from fusedops._core.architecture import architecture
from fusedops.bench.tuner import MeasuredCall, choose
from fusedops.cli.main import app

CPU = torch.device("cpu")
KEY = ("gelu", torch.float32, 9)
native = pytest.mark.skipif(extension.cpu_library() is not None, reason="no compiled library")


def invoke(*args: str) -> Any:
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(app, ["bench", "tune", *args])
    finally:
        torch.set_num_threads(threads)


@native
def test_a_quick_run_writes_a_table_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    before = backends.tuning_in_force(CPU)
    done = invoke(
        *("--ops", "layer_norm", "--quick", "--seconds", "0.02", "--dtype", "float32"),
        *("--allocator", "system", "--threads", "1", "--out", str(path)),
    )
    assert done.exit_code == 0, done.output
    assert f"FUSEDOPS_TUNING={path}" in done.output and "layer_norm_backward" in done.output
    assert backends.tuning_in_force(CPU) is before
    monkeypatch.setenv("FUSEDOPS_TUNING", str(path))
    ops = [name + suffix for name in backends.op_names() for suffix in ("", "_backward")]
    loaded = tuning.load(CPU, ops, {"cpu": ("cpp", "torch")})
    assert loaded.ignored == () and loaded.tables[-1].path == path
    (table,) = (each for each in loaded.tables if each.path == path)
    assert table.architecture == architecture(CPU)
    assert table.versions["torch"] == torch.__version__
    # The headline size, 4096x1024, and a tiny one, each forward and backward.
    keys = [(each.op, each.size_class) for each in table.entries]
    assert keys == sorted(keys) and len(keys) == 4
    assert {("layer_norm", 22), ("layer_norm_backward", 22)} < set(keys)
    for entry in table.entries:
        assert set(entry.median_us) == {"cpp", "torch"} and entry.dtype == "float32"
        assert all(us > 0 for us in entry.median_us.values())
    assert path.read_text() == tuning.dump(table)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ops", "layer_nrm"), "unknown ops 'layer_nrm': did you mean layer_norm?"),
        (("--ops", ","), "--ops is empty"),
        (("--dtype", "float8"), "unknown dtype 'float8'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--allocator", "jemalloc"), "unknown allocator 'jemalloc'"),
        (("--out", "/no/such/folder/a.json"), "folder /no/such/folder does not exist"),
        (("--out", "/"), "cannot write /: it is a folder"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("--allocator", "system", *arguments)
    assert done.exit_code == 2
    errors = [line for line in done.output.splitlines() if "error:" in line]
    assert len(errors) == 1 and says in errors[0], done.output
    assert "Traceback" not in done.output and list(tmp_path.iterdir()) == []


def test_without_a_second_backend_there_is_nothing_to_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fusedops.bench.tuner._compare", lambda *_: None)
    done = invoke("--allocator", "system", "--ops", "layer_norm", "--quick")
    assert done.exit_code == 2 and "there is nothing to tune" in done.output, done.output
    assert list(tmp_path.iterdir()) == []


def measured(
    gain: float, *, sure: bool = True, default: str = "cpp", case: str = "a"
) -> MeasuredCall:
    return MeasuredCall(
        key=KEY,
        default=default,
        median_us={"cpp": 10.0 * gain, "torch": 10.0},
        ratio={"cpp": 1.0, "torch": gain},
        sure={"cpp": False, "torch": sure},
        case=case,
    )


@pytest.mark.parametrize(
    ("gains", "winner", "ratio"),
    [
        ((1.5,), "torch", 1.5),
        ((1.04,), "cpp", 1.0),
        ((0.8,), "cpp", 1.0),
        ((1.5, 1.2), "torch", 1.2),
        ((1.5, 1.04), "cpp", 1.0),
    ],
)
def test_another_backend_must_win_clearly_at_every_size(
    gains: tuple[float, ...], winner: str, ratio: float
) -> None:
    entry = choose([measured(gain, case=f"case{i}") for i, gain in enumerate(gains)])
    assert entry is not None
    assert (entry.op, entry.dtype, entry.size_class) == ("gelu", "float32", 9)
    assert (entry.backend, entry.config, entry.ratio) == (winner, None, ratio)
    assert entry.cases == tuple(f"case{i}" for i in range(len(gains)))


def test_a_disturbed_win_changes_nothing() -> None:
    entry = choose([measured(1.5, sure=False)])
    assert entry is not None and entry.backend == "cpp"


def test_the_fastest_configuration_is_named() -> None:
    ratios = {"cuda": 1.0, "triton": 1.2, "triton:wide": 1.4, "torch": 0.2}
    medians = {name: 100 / ratio for name, ratio in ratios.items()}
    entry = choose([MeasuredCall(KEY, "cuda", medians, ratios, dict.fromkeys(ratios, True))])
    assert entry is not None
    assert (entry.backend, entry.config, entry.ratio) == ("triton", "wide", 1.4)


def test_sizes_with_different_defaults_have_no_entry() -> None:
    assert choose([measured(1.5), measured(1.5, default="torch")]) is None
