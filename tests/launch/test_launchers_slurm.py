"""``fusedops train`` under a real slurmctld and two slurmd: time limit, kill, requeue, mistakes."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from command_runs import (
    assert_same_end,
    environment,
    install,
    num_steps,
    run_uninterrupted,
    write_config,
)

from fusedops.launch.job import first_node

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not()),
]
SCRIPT = Path(__file__).parents[2] / "examples" / "launchers" / "train.sbatch"
PATIENCE_SECONDS = 400.0
MANY_STEPS = 100000
SHAPE = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Run a cluster, and give the environment of its users."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short, as a socket's path is
        with slurm_cluster.cluster(Path(folder)) as cluster:
            path = install(Path(folder), "fusedops", "fusedops")
            yield environment(PATH=path, SLURM_CONF=cluster["SLURM_CONF"])


def submit(slurm: dict[str, str], config: Path, *options: str) -> str:
    """Submit the example and return the job's number."""
    words = ["sbatch", "--parsable", *SHAPE, f"--output={config.parent}/log", *options]
    done = subprocess.run(
        [*words, str(SCRIPT), str(config)], env=slurm, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def read_log(config: Path) -> str:
    log = config.parent / "log"
    return log.read_text() if log.exists() else ""


def wait_until(holds: Callable[[], bool], config: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, read_log(config)
        time.sleep(0.1)


def job(slurm: dict[str, str], number: str) -> dict[str, str]:
    """Return what Slurm says of a job."""
    words = ["scontrol", "show", "job", number]
    done = subprocess.run(words, env=slurm, capture_output=True, text=True, check=True)
    return dict(re.findall(r"(\S+?)=(\S+)", done.stdout))


def ended(slurm: dict[str, str], number: str, config: Path) -> dict[str, str]:
    """Wait until a job has ended, and return what Slurm says of it."""
    states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_until(lambda: job(slurm, number)["JobState"] in states, config)
    return job(slurm, number)


def test_a_run_is_stopped_before_the_time_limit_requeued_and_ends_with_the_same_bits(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, MANY_STEPS)
    text = config.read_text() + 'schedule = { kind = "constant" }\n'
    config.write_text(text)
    number = submit(slurm, config, "--time=1", "--signal=USR1@10")
    wait_until(lambda: "and saved; " in read_log(config), config)
    steps = num_steps(tmp_path / "run") + 20
    config.write_text(text.replace(str(MANY_STEPS), str(steps)))
    # The limit of the next start is long enough, however busy this machine is.
    raised = ["scontrol", "update", f"JobId={number}", "TimeLimit=60"]
    subprocess.run(raised, env=slurm, check=True)
    record = ended(slurm, number, config)
    log = (tmp_path / "log").read_text()
    assert record["JobState"] == "COMPLETED" and int(record["Restarts"]) >= 1, log
    assert f"stopped at step {steps - 20} and saved" in log
    assert f"resumes from step {steps - 20}" in log and f"done: {steps} steps" in log, log
    assert "Traceback" not in log, log
    reference = run_uninterrupted(config, "reference")
    assert_same_end(tmp_path / "run", reference, steps)


def test_a_run_of_which_a_process_is_killed_is_requeued_and_ends_with_the_same_bits(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    steps = 100
    config = write_config(tmp_path, steps)
    number = submit(slurm, config)
    wait_until(lambda: num_steps(tmp_path / "run") >= 15, config)
    for process in psutil.process_iter():
        try:
            if str(config) in process.cmdline() and process.environ().get("SLURM_PROCID") == "1":
                process.kill()
        except psutil.Error:
            continue
    record = ended(slurm, number, config)
    log = (tmp_path / "log").read_text()
    assert record["JobState"] == "COMPLETED" and record["Restarts"] == "1", log
    assert "Killed" in log and "the other processes are gone" in log
    assert "resumes from step " in log and "Traceback" not in log, log
    reference = run_uninterrupted(config, "reference")
    assert_same_end(tmp_path / "run", reference, steps)


def test_a_cancelled_run_saves_and_the_next_job_resumes(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, MANY_STEPS)
    number = submit(slurm, config)
    wait_until(lambda: num_steps(tmp_path / "run") >= 15, config)
    subprocess.run(["scancel", number], env=slurm, check=True)
    assert ended(slurm, number, config)["JobState"] == "CANCELLED"
    wait_until(lambda: "stopped at step " in read_log(config), config)
    stopped = num_steps(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped:010d}.0").exists()


def test_a_mistake_in_the_configuration_is_not_requeued(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, 5)
    config.write_text(config.read_text().replace("steps =", "stepz ="))
    number = submit(slurm, config)
    record = ended(slurm, number, config)
    assert record["JobState"] == "FAILED" and record["Restarts"] == "0"
    assert record["ExitCode"] == "2:0"
    log = (tmp_path / "log").read_text()
    assert log.count("fusedops: error: ") == 1 and "did you mean 'steps'?" in log, log


def test_the_first_name_of_nodes_is_that_of_scontrol(slurm: dict[str, str]) -> None:
    for text in ("gpu[098-101,7],login", "r[1-2]n[01-02]", "127.0.0.[1-2]", "a-[1-3],b"):
        words = ["scontrol", "show", "hostnames", text]
        done = subprocess.run(words, env=slurm, capture_output=True, text=True, check=True)
        assert first_node(text) == done.stdout.split()[0]
