"""``examples/launchers/torchrun.sh`` on two machines, which are network namespaces of this one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import network_namespaces
import psutil
import pytest
from command_runs import (
    assert_same_end,
    ended,
    environment,
    install,
    num_steps,
    run_uninterrupted,
    wait_for_steps,
    write_config,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "launchers" / "torchrun.sh"
STEPS = 60


@pytest.fixture
def two_machines() -> Iterator[list[list[str]]]:
    with network_namespaces.two_machines() as enters:
        yield enters


def start(
    machines: list[list[str]], config: Path, processes: tuple[int, int] = (1, 1)
) -> list[subprocess.Popen[str]]:
    """Start the example on both machines."""
    shared = environment(
        PATH=install(config.parent, "torchrun", "torch.distributed.run"),
        GLOO_SOCKET_IFNAME=network_namespaces.LINK,
        FUSEDOPS_SHARED_MEMORY="0",  # two machines have none
        NODES="2",
        MASTER_ADDR=network_namespaces.ADDRESSES[0],
        RESTARTS="1" if processes == (1, 1) else "0",  # a mistake is not mended by one
    )
    return [
        subprocess.Popen(
            [*enter, str(SCRIPT), str(config)],
            env=shared | {"NODE_RANK": str(node), "PROCESSES": str(processes[node])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, enter in enumerate(machines)
    ]


def kill_rank_1(agents: list[subprocess.Popen[str]]) -> None:
    for child in psutil.Process(agents[1].pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()


def stop_both(agents: list[subprocess.Popen[str]]) -> None:
    for agent in agents:
        agent.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize("interrupt", [kill_rank_1, stop_both])
def test_a_run_on_two_machines_that_is_interrupted_ends_with_the_same_bits(
    two_machines: list[list[str]],
    tmp_path: Path,
    interrupt: Callable[[list[subprocess.Popen[str]]], None],
) -> None:
    config = write_config(tmp_path, STEPS)
    agents = start(two_machines, config)
    wait_for_steps(tmp_path / "run", 15)
    interrupt(agents)
    codes, reports = ended(*agents)
    if interrupt is stop_both:
        assert "stopped at step " in reports[0], reports
        assert num_steps(tmp_path / "run") < STEPS
        codes, reports = ended(*start(two_machines, config))
    assert codes == [0, 0], reports
    assert "resumes from step " in reports[0] and f"done: {STEPS} steps" in reports[0]
    assert_same_end(tmp_path / "run", run_uninterrupted(config, "reference"), STEPS)


def test_unlike_numbers_of_processes_are_one_line(
    two_machines: list[list[str]], tmp_path: Path
) -> None:
    config = write_config(tmp_path, STEPS)
    _, reports = ended(*start(two_machines, config, (1, 2)))
    lines = "".join(reports).splitlines()
    lines = [line for line in lines if line.startswith("fusedops: error: ")]
    assert lines and all("every node must have as many processes, got 1 on" in x for x in lines)
    assert not (tmp_path / "run").exists()
