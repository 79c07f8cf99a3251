"""The place of a process in its job, which may train together, and how they connect."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_runs import free_port, write_config
from torch import distributed as dist
from typer.testing import CliRunner

from fusedops._core import env
from fusedops.cli.errors import report_errors_once
from fusedops.cli.main import app
from fusedops.launch import job, processes
from fusedops.launch.config_table import InputError
from fusedops.launch.processes import initialize_distributed
from fusedops.launch.start_checks import Place, check, exchange
from fusedops.parallel.comm import host_groups

# As srun of Slurm 22.05 sets them for the third of four processes on two nodes.
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers, and those that a test sets afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in env.job_variables():
        del os.environ[name]


def test_srun_says_rank_world_and_address() -> None:
    place = job.from_slurm(SLURM)
    assert place.pop("MASTER_PORT") == str(20000 + 16 * 12 + 3)
    assert place == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
    }


def test_address_and_port_of_the_user_win() -> None:
    given = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"}
    place = job.from_slurm(given)
    assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "4321")


def test_steps_of_a_job_and_jobs_of_a_node_have_ports_of_their_own() -> None:
    jobs = [SLURM | {"SLURM_JOB_ID": str(number)} for number in range(1000, 1500)]
    steps = [SLURM | {"SLURM_STEP_ID": str(number)} for number in range(16)]
    for cases in (jobs, steps):
        ports = [int(job.from_slurm(case)["MASTER_PORT"]) for case in cases]
        assert len(set(ports)) == len(ports)
        assert min(ports) >= 20000 and max(ports) < 32768


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # salloc's shell
    ],
)
def test_without_several_tasks_of_srun_a_process_is_alone(given: dict[str, str]) -> None:
    assert job.from_slurm(given) == {}


def test_the_first_of_a_list_of_nodes() -> None:
    for text, name in {
        "gpu1": "gpu1",
        "a,b-2,c": "a",
        "gpu[1-3]": "gpu1",
        "gpu[098-101,7],login": "gpu098",
        "r[1-2]n[01-02].x": "r1n01.x",
        "127.0.0.[1-2]": "127.0.0.1",
    }.items():
        assert job.first_node(text) == name
    for text in ("", "gpu[1-", "gpu[a-b]", "gpu1]"):
        with pytest.raises(InputError, match=r"NODELIST must be as in gpu\[08-10"):
            job.first_node(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 contradicts SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be an integer of at least 0, got 'x'"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "Slurm's variables contradict each other: SLURM_STEP_NUM"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_TASKS_PER_NODE=2; start the processes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "srun started 3,1 processes on the nodes gpu[08-09"),
        ({"SLURM_NODEID": "0"}, "give srun --distribution=block"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID must be an integer"),
    ],
)
def test_variables_of_slurm_that_contradict_each_other(
    changes: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        job.from_slurm(SLURM | changes)


def test_a_variable_of_slurm_that_is_missing_is_named() -> None:
    given = {name: value for name, value in SLURM.items() if name != "SLURM_NODEID"}
    with pytest.raises(InputError, match="srun sets SLURM_NODEID, and here it is not set"):
        job.from_slurm(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 contradicts WORLD_SIZE=2: it must be in 0 to 1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be an integer of at least 0, got 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set, and 2 processes need it"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set, and 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"},
            "MASTER_PORT must be in 1 to 65535, got 70000",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1 contradicts LOCAL_WORLD_SIZE=1",
        ),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "1"}, "give srun --distribution=block"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_mistake_of_the_launcher_is_one_line_of_the_command(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    os.environ.update(given)
    done = CliRunner().invoke(app, ["train", str(write_config(tmp_path, 1))])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("fusedops: error: ") and message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("alone")
def test_processes_of_a_launcher_start_no_processes_and_the_first_reports(tmp_path: Path) -> None:
    words = ["train", str(write_config(tmp_path, 1)), "--processes", "2"]
    for task in ({"SLURM_PROCID": "1"}, {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}):
        os.environ.update(SLURM | task)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        said = "the launcher has started 4 already" in done.stderr
        assert said == (task["SLURM_PROCID"] == "0") == bool(done.stderr)


def test_a_stop_code_is_none_of_an_error() -> None:
    done = CliRunner().invoke(app, ["train", "none.toml", "--stop-code", "2"])
    assert done.exit_code == 2 and "--stop-code must not be 2" in done.stderr


@pytest.mark.usefixtures("alone")
def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
        with pytest.raises(InputError) as caught, initialize_distributed("cpu"):
            pass
    message = f"another process listens on localhost:{port}: set MASTER_PORT to a free port"
    assert str(caught.value) == message


def _connect(monkeypatch: pytest.MonkeyPatch, rank: int, address: str, seconds: float) -> None:
    """Wait for the other of two processes, which never comes."""
    monkeypatch.setattr(processes, "_CONNECTION", timedelta(seconds=seconds))
    port = str(free_port())
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=port)
    with report_errors_once(), initialize_distributed("cpu"):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-machine.invalid"])
@pytest.mark.usefixtures("alone")
def test_a_rank_0_that_cannot_be_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setattr(processes, "_UNTOLD_SECONDS", 60.0)  # a busy machine takes longer than 5
    with pytest.raises(SystemExit) as caught:
        _connect(monkeypatch, 1, address, 1)
    (line,) = capsys.readouterr().err.splitlines()
    named = f"{address}:{os.environ['MASTER_PORT']}: "
    assert line.startswith(f"fusedops: error: process 1 cannot reach rank 0 at {named}")
    assert caught.value.code == 1


@pytest.mark.parametrize(("rank", "waits"), [(0, "the other processes"), (1, "rank 0")])
@pytest.mark.usefixtures("alone")
def test_a_process_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, waits: str
) -> None:
    monkeypatch.setattr(processes, "_UNTOLD_SECONDS", 0.1)
    with pytest.raises(SystemExit):
        _connect(monkeypatch, rank, "127.0.0.1", 2)
    line, error = capsys.readouterr().err.splitlines()
    named = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    assert line.startswith(f"fusedops: rank {rank} of 2 waits for {waits} at {named}, for")
    assert f"RANK={rank}, WORLD_SIZE=2, " in line
    assert line.endswith("to run on one process: unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT")
    if rank == 0:
        assert f"not all of 2 processes came to {named} within 2 seconds" in error


@pytest.mark.usefixtures("alone")
def test_one_process_needs_no_address() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1")
    with initialize_distributed("cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)


GPU_1 = Place("here", "GPU-1", 2, "")
FITTING: dict[str, list[Place]] = {
    "two GPUs of a host": [GPU_1, replace(GPU_1, gpu="GPU-2")],
    "equal names of GPUs of two hosts": [GPU_1, replace(GPU_1, host="there")],
    "the CPU": [replace(GPU_1, gpu="")] * 3,
}
REFUSED: dict[str, tuple[list[Place], str]] = {
    "one GPU twice": (
        [GPU_1, replace(GPU_1, gpu="GPU-2"), GPU_1],
        "ranks 0, 2 have one GPU of here",
    ),
    "a host without a GPU": (
        [GPU_1, replace(GPU_1, host="there", gpu="")],
        r"torch sees no GPU in rank 1 \(there\), and the others have one",
    ),
    "unequal hosts": (
        [GPU_1, replace(GPU_1, host="there", local_ranks=1)],
        "as many processes, got 2 on here, 1 on there",
    ),
    "a problem of one": ([GPU_1, replace(GPU_1, gpu="", problem="it is broken")], "it is broken"),
}


def test_places_that_fit_are_accepted() -> None:
    for places in FITTING.values():
        check(places)


@pytest.mark.parametrize("case", REFUSED)
def test_places_that_do_not_fit_are_refused(case: str) -> None:
    places, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        check(places)


def test_places_are_exchanged_as_often_as_asked() -> None:
    store, size = dist.HashStore(), 3
    for attempt in ("first", "second"):
        given = [replace(GPU_1, host=f"{attempt} {rank}") for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            exchanged = pool.map(exchange, given, [store] * size, range(size), [size] * size)
        assert list(exchanged) == [given] * size


def test_a_process_that_sees_one_gpu_may_be_any_of_its_node() -> None:
    assert not processes._device_problem("auto", "cuda", local=3, count=1)
    assert not processes._device_problem("auto", "cuda", local=1, count=2)
    problem = processes._device_problem("auto", "cuda", local=3, count=2)
    assert "4 processes on a machine need as many GPUs there" in problem


def test_nccl_connects_at_once_and_hosts_have_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    world, hosts = object(), object()
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **how: calls.append((kind, how)))
    monkeypatch.setattr(
        dist, "new_group", lambda backend, **_: hosts if backend == "gloo" else None
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    companions: dict[object, object] = {}
    monkeypatch.setattr(host_groups, "_companions", companions)
    device = torch.device("cuda", 1)
    processes.connect(device, dist.HashStore(), 1, 4)
    processes.connect(device, dist.HashStore(), 0, 1)
    (kind, given), (alone, _) = calls
    assert kind == "nccl" and given["device_id"] == device and companions == {world: hosts}
    assert alone == "cpu:gloo,cuda:nccl"


def test_the_only_gpu_that_is_seen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(processes.env, "launched", lambda: (3, 4, 3))
    monkeypatch.setattr(processes, "join_job", lambda: None)
    monkeypatch.setattr(processes, "_store", dist.HashStore)
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def stop(*args: Any, **options: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(processes, "exchange", stop)
    with pytest.raises(InterruptedError), processes.initialize_distributed("auto"):
        pass
    assert taken == [torch.device("cuda", 0)]
