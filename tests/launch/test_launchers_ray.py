"""``examples/launchers/ray_train.py`` on two workers, of which one is killed.

``make test-launchers`` runs it with the Python in which Ray is installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_runs import assert_same_end, environment, num_steps, run_uninterrupted, write_config

pytest.importorskip("ray", reason="ray is not installed: make test-launchers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "launchers" / "ray_train.py"
PATIENCE_SECONDS = 500.0
STEPS = 300
ENVIRONMENT = environment(RAY_USAGE_STATS_ENABLED="0")


def command(config: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), str(config), "--workers", "2", "--cpu"]


def test_a_run_of_which_a_worker_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = write_config(tmp_path, STEPS)
    log = tmp_path / "log"
    with log.open("w") as out:
        driver = subprocess.Popen(command(config), env=ENVIRONMENT, stdout=out, stderr=out)
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while num_steps(tmp_path / "run") < 15:
            assert driver.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.05)
        # "process 123 of host": the worker of rank 0.
        worker = int((tmp_path / "run" / "lock").read_text().split()[1])
        psutil.Process(worker).kill()
        assert driver.wait(PATIENCE_SECONDS) == 0, log.read_text()[-4000:]
    finally:
        driver.terminate()
        driver.wait()
    text = log.read_text()
    assert f"done: {tmp_path}/run" in text
    assert int((tmp_path / "run" / "lock").read_text().split()[1]) != worker
    assert_same_end(tmp_path / "run", run_uninterrupted(config, "reference"), STEPS)


def test_a_mistake_ends_before_a_worker_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path, 5)
    words = [*command(config), "--set", "optimizer.lrr=1"]
    done = subprocess.run(
        words, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 2 and not (tmp_path / "ray").exists()
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert "did you mean 'lr'?" in done.stderr
