"""Processes of benchmarks: stopped while others are measured, and ended with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bench_team_steps
import pytest
from run_ranks import CONTEXT

from fusedops.bench import teams
from fusedops.bench.teams import interleaved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_waiting_processes_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its processes have torch already.
    monkeypatch.setattr(teams.multiprocessing, "get_context", lambda _: CONTEXT)
    measured = interleaved(bench_team_steps.settings(str(tmp_path)), 0.3, lambda _: None)
    assert [loss for _, loss in measured] == [1.0, 1.0]
    assert all(len(times) >= 3 and min(times) > 0.02 for times, _ in measured)
    for name in ("first", "second"):
        states = (tmp_path / f"{name}.states").read_text().split()
        # Before the first turn of the other setting, its process is still starting.
        assert set(states[-20:]) == {"T"}


@pytest.mark.ci
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
