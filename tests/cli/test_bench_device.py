"""``fusedops bench device`` and ``scaling``: small models, and processes that take turns."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_team_steps
import pytest
import run_ranks
import torch

from fusedops.bench import device as bench
from fusedops.bench import scaling, teams
from fusedops.bench.small_models import SmallModel
from fusedops.bench.teams import interleaved
from fusedops.cli.bench import small_models as scaling_command
from fusedops.cli.main import app
from fusedops.planner import load_device
from fusedops.terminal.files import UserError
from fusedops.testing import threads


@pytest.mark.slow
def test_the_command_writes_a_device_that_predicts_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = (SmallModel("gpt2", 64, 2, 128), 2, 16, 2)
    other = (SmallModel("gpt2", 64, 1, 128), 1, 16, 1)
    monkeypatch.setattr(bench, "sizes", lambda *, quick=False: [case, other])
    monkeypatch.setattr(bench, "_TOGETHER", ({"dp": 2}, {"tp": 2}))
    results, measure = [], bench.measure_device

    def kept(*args: Any, **options: Any) -> bench.MeasuredDevice:
        results.append(measure(*args, **options))
        return results[-1]

    monkeypatch.setattr(bench, "measure_device", kept)
    file, links = tmp_path / "mine.toml", tmp_path / "links.json"
    curve = {"collective": "all_reduce", "backend": "gloo", "ranks": 2, "latency": 0.0}
    links.write_text(json.dumps({"curves": [curve | {"slopes": [1e-9], "knees": []}]}))
    words = ["bench", "device", "--out", str(file), "--seconds", "0.01", "--links", str(links)]
    app([*words, "--quick", "--dtype", "float32"], standalone_mode=False)
    (measured,) = results
    together = 2 if len(os.sched_getaffinity(0)) > 1 else 0
    assert len(measured.steps) == len(measured.errors) == 2 + together
    assert [(step.shape.dp, step.shape.tp) for step in measured.steps[2:]] == (
        [(2, 1), (1, 2)][:together]
    )
    first = measured.steps[0].shape
    assert (first.hidden, first.micro_batch, first.microbatches, first.seq_len) == (64, 2, 2, 16)
    assert all(math.isfinite(error) for error in measured.errors)
    own = load_device(file)
    # The all-reduce of two ranks sends each byte once, at 1 GB/s, of which 0.7 is the usual share.
    assert own.links.node == pytest.approx(1e9 / 0.7, rel=1e-5)
    assert own.peak["float32"] > 1e9 and own.memory.bandwidth > 1e8
    assert f"fitted on {2 + together} steps" in own.sources["efficiency"]
    assert "fusedops plan time --device" in capsys.readouterr().out


def test_settings_of_the_scaling_benchmark_are_predicted() -> None:
    work = scaling.ScalingWork("gpt2", 256, 4, 512, 8, 128)
    own = load_device("a100-80")
    seconds = {
        name: scaling.predicted(work, setting, [own]) for name, setting in scaling.SETTINGS.items()
    }
    assert seconds["patched transformers"] is None
    others = [value for value in seconds.values() if value is not None]
    assert len(others) == len(scaling.SETTINGS) - 1 and min(others) > 0
    plain, pipeline = seconds["one process, 8 parts"], seconds["pp 2"]
    assert plain is not None and pipeline is not None and pipeline < plain


WORK = scaling.ScalingWork("gpt2", 128, 4, 96, 8, 16)


def _losses(setting: scaling.ScalingSetting) -> list[float]:
    step = scaling._step_of(setting, WORK)
    return [step() for _ in range(2)]


def test_settings_differ_in_speed_alone() -> None:
    """The first losses are those of one process, and the second ones are smaller."""
    expected = torch.tensor(_losses(scaling.SETTINGS[scaling.FIRST]))
    assert expected[1] < expected[0]
    for setting in scaling.SETTINGS.values():
        if setting.parallel:
            found = threads.run(lambda rank, s=setting: _losses(s), setting.processes)
            for losses in found:
                torch.testing.assert_close(torch.tensor(losses), expected, msg=setting.name)


def test_names_that_hold_commas_are_found() -> None:
    known = {name.replace(" ", ""): name for name in scaling.SETTINGS}
    assert scaling_command.setting_names("dp2,zero1,tp2", known) == ["dp2,zero1", "tp2"]
    assert scaling_command.setting_names("dp2,tp2,sp", known) == ["dp2", "tp2,sp"]
    assert scaling_command.setting_names("", known) == list(known)
    with pytest.raises(UserError, match="dp3"):
        scaling_command.setting_names("dp3", known)


reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@reads_proc
@pytest.mark.slow
def test_waiting_processes_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its processes have torch already.
    monkeypatch.setattr(teams.multiprocessing, "get_context", lambda _: run_ranks.CONTEXT)
    measured = interleaved(bench_team_steps.settings(str(tmp_path)), 0.3, lambda _: None)
    assert [loss for _, loss in measured] == [1.0, 1.0]
    assert all(len(times) >= 3 and min(times) > 0.02 for times, _ in measured)
    for name in ("first", "second"):
        states = (tmp_path / f"{name}.states").read_text().split()
        # Before the first turn of the other setting, its process is still starting.
        assert set(states[-20:]) == {"T"}


@reads_proc
@pytest.mark.slow
def test_stopped_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, bench_team_steps.__file__, str(tmp_path)]
    parent = subprocess.Popen(command, start_new_session=True)
    try:
        files = [tmp_path / f"{name}.states" for name in ("first", "second")]
        wait_for(lambda: all(file.exists() for file in files))
        pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return bench_team_steps.state_of(pid) not in "ZX"
