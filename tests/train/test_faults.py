"""What ``docs/faults.md`` says: each thing that breaks ends the job on all ranks, and is named.

Ranks are processes of a fork server wherever torchrun's agent has no part in what is tested: that
saves half a minute of imports each time.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import network_namespaces
import psutil
import pytest
import torch
from command_runs import command, ended, wait_for_steps, write_config
from run_ranks import CONTEXT, start_process
from torch import distributed as dist
from train_runs import around_backward, config
from typer.testing import CliRunner

from fusedops.checkpoint import CheckpointError
from fusedops.checkpoint import folder as folders
from fusedops.cli.main import app
from fusedops.generation import Decoder
from fusedops.launch import flight_record
from fusedops.launch.flight_record import FlightRecord
from fusedops.launch.processes import Ranks, initialize_distributed
from fusedops.launch.watchdog import Watchdog, _StackTimer, find_stragglers
from fusedops.models import Transformer, preset, save_huggingface
from fusedops.parallel.comm import collectives
from fusedops.train import train
from fusedops.train.builder import Run

HANGING_SECONDS = 15.0
# What a process that hangs gets to end by itself, after the others have.
LEFT_SECONDS = 20.0
PATIENCE_SECONDS = 300.0


def record(rank: int, waits: str | None = None, *, step: int = 3, **groups: int) -> FlightRecord:
    return FlightRecord(rank, "host", 100 + rank, step, "step", waits, groups, "")


IN_7 = "all_reduce 7 of the group a"
# Records by rank, ranks, those that are slow, who is to blame, and what is told.
BLAMED: dict[str, tuple[dict[int, FlightRecord], int, list[int], list[int], str]] = {
    "waits for nobody": (
        {0: record(0, IN_7, a=7), 1: record(1, a=6), 2: record(2, IN_7, a=7)},
        *(3, [], [1], "process 1 is hanging in step 3, waiting for nobody"),
    ),
    "silent before slow": ({0: record(0, IN_7, a=7)}, 3, [2], [1], "process 1 is silent: stopped"),
    "slow": ({0: record(0, IN_7, a=7)}, 2, [1], [1], "process 1 is still at work, and the others"),
    "behind": (
        {0: record(0, IN_7, a=7), 1: record(1, "wait", a=6, b=2)},
        *(2, [], [1], f"process 1 is behind the others, and all wait: process 0 in {IN_7}; "),
    ),
    "all wait": (
        {rank: record(rank, IN_7, a=7) for rank in (0, 1)},
        *(2, [], [], "all wait for each other, as where a link is cut: "),
    ),
}


@pytest.mark.parametrize("case", BLAMED)
def test_who_is_to_blame(case: str) -> None:
    records, size, slow, blamed, told = BLAMED[case]
    found, text = find_stragglers(records, size, slow)
    assert found == blamed and text.startswith(told)


def test_frames_of_collectives_are_known_as_waiting() -> None:
    for module in (collectives, dist.distributed_c10d):
        assert any(part in str(module.__file__) for part in flight_record._WAITING)


def _full(*steps: int) -> Callable[[Path, bytes], None]:
    """Return what writes files as ever, but those of some steps' checkpoints."""
    plain, names = folders.write, [f".partial-step-{step:010d}.0" for step in steps]

    def write(path: Path, content: bytes) -> None:
        if path.parent.name in names:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        plain(path, content)

    return write


def test_a_run_goes_on_without_a_checkpoint_and_fails_without_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"steps": 6, "checkpoint": {"every": 2}}
    with monkeypatch.context() as disk:
        disk.setattr(folders, "write", _full(4))  # which is known when the last one is due
        assert train(config(tmp_path, **given)).finished
    told = "step 4 was not written: No space left on device"
    assert caplog.text.count(told) == 1
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [folders.step_of(each) for each in kept] == [2, 6]
    with monkeypatch.context() as disk, pytest.raises(CheckpointError, match="step 6 was not"):
        disk.setattr(folders, "write", _full(4, 6))
        train(config(tmp_path, out=str(tmp_path / "other"), **given))
    # A command that finds no good checkpoint ends, and begins nothing anew.
    for each in kept:
        (each / "rank-00000.pt").write_bytes(b"")
    file = write_config(tmp_path, 20)
    monkeypatch.chdir(tmp_path)
    for words in (["train", str(file), "--set", "out=run"], ["generate", "run", "--prompt", "1"]):
        done = CliRunner().invoke(app, words)
        *_, last = done.stderr.splitlines()
        assert done.exit_code == 1, done.output
        assert last.startswith("fusedops: error: no checkpoint in run/checkpoints is good: ")
        assert all(each.name in last for each in kept)
    assert not (tmp_path / "run" / "faults").exists()


def _suspended(connection: Any, folder: str) -> None:
    """Make progress under a watch, of which the parent suspends the process."""
    with initialize_distributed("cpu") as ranks, Watchdog(ranks, Path(folder), 2.0) as watch:
        for step in range(8):
            watch.set_phase(step, "step")
            connection.send(step)
            time.sleep(0.25)
    connection.send("ends")


def _descend(depth: int) -> int:
    return depth and _descend(depth - 1)


def _written_while_running(connection: Any, path: Path) -> None:
    """Let the timer write the stack again and again while calls begin and end."""
    with path.open("w") as file:
        timer = _StackTimer(file)
        for _ in range(300):
            timer.restart(1e-4)
            for _ in range(20):
                _descend(200)
        timer.close()
    connection.send(path.read_text().count("most recent call first"))


def test_one_of_a_thousand_stuck_processes_reads_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 1024
    waits = "all_reduce 7 of the group default_pg"
    shared = dist.HashStore()
    for rank in range(size):
        shared.set(f"record-{rank}", json.dumps(asdict(record(rank, waits, a=7))))
        shared.set(f"beat-{rank}", "1")
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(Watchdog, "_grace", 0.01)
    requests = []
    for rank in range(3):
        store = mock.Mock(wraps=shared)
        store.clone.return_value = store
        watchdog = Watchdog(Ranks(rank, size, torch.device("cpu"), store), tmp_path, 1.0)
        watchdog._record = record(rank, waits, a=6 if rank == 0 else 7)
        watchdog._stuck.set()
        watchdog._send_heartbeats()
        assert watchdog._reported.is_set()
        requests.append(len(store.method_calls))
    assert requests[0] <= 6 * size + 10 and max(requests[1:]) <= 10
    assert "process 0 is behind the others" in capsys.readouterr().err


def test_a_stack_is_written_while_calls_begin_and_end(tmp_path: Path) -> None:
    process, mine = start_process(_written_while_running, tmp_path / "stacks")
    assert mine.recv() > 100
    process.join()


@pytest.mark.ci
def test_time_in_which_a_process_was_suspended_does_not_count(tmp_path: Path) -> None:
    process, mine = start_process(_suspended, str(tmp_path))
    assert [mine.recv() for _ in range(3)] == [0, 1, 2]
    watched = psutil.Process(process.pid)
    watched.suspend()
    time.sleep(3.0)
    watched.resume()
    assert [mine.recv() for _ in range(6)] == [*range(3, 8), "ends"]
    process.join()
    assert process.exitcode == 0 and not (tmp_path / "faults").exists()


def test_without_a_timeout_nobody_watches(tmp_path: Path) -> None:
    before = threading.active_count()
    with (
        initialize_distributed("cpu") as ranks,
        Watchdog(Ranks(0, 1, ranks.device, ranks.store), tmp_path, 0.0),
    ):
        assert threading.active_count() == before and not any(tmp_path.iterdir())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_config(tmp_path, 100000, f"faults = {{ timeout = {HANGING_SECONDS} }}\n")


def hold_the_lock() -> None:
    """Hang in C without giving the interpreter's lock back: no thread of Python's goes on."""
    ctypes.PyDLL(None).read(os.pipe()[0], bytes(1), 1)


KINDS: dict[str, Callable[[], object]] = {
    "lock": hold_the_lock,
    "segment": lambda: ctypes.string_at(0),
}


def _started(rank: int, port: int, folder: str) -> None:
    """Make this process one of two that torchrun's agent starts; its messages go into a file."""
    os.dup2(os.open(f"{folder}/told-{rank}", os.O_CREAT | os.O_WRONLY), sys.__stderr__.fileno())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _faulty(rank: int, port: int, folder: str, kind: str) -> None:
    """Run the command as one of two ranks; something happens to the second in step 7."""
    _started(rank, port, folder)

    def fail(run: Run) -> None:
        if rank == 1 and run.step == 6:
            KINDS[kind]()

    with around_backward(before=fail):
        app(["train", f"{folder}/train.toml"], prog_name="fusedops")


def _killed_while_generating(rank: int, port: int, folder: str) -> None:
    """Run the command as one of two ranks, of which the second is killed at the sixth token."""
    _started(rank, port, folder)
    plain, calls = Decoder.step, itertools.count()

    def step(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(decoder, tokens)

    Decoder.step = step  # type: ignore[method-assign]
    app(["generate", folder, "--tokenizer", "bytes", "--prompt", "a"], prog_name="fusedops")


def with_fault(
    folder: Path, target: Callable[..., None], *args: Any
) -> tuple[list[int | None], str]:
    """Do something on two ranks, of which something happens to the second.

    Returns their exit codes, ``None`` of one that does not end by itself, and what they told.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's
    given = [(rank, store.port, str(folder), *args) for rank in range(2)]
    started = [CONTEXT.Process(target=target, args=each) for each in given]
    for each in started:
        each.start()
    codes = []
    for each, patience in zip(started, (PATIENCE_SECONDS, LEFT_SECONDS), strict=True):
        each.join(patience)
        codes.append(each.exitcode)
        each.kill()
    return codes, "".join((folder / f"told-{rank}").read_text() for rank in range(2))


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what ranks left of where they stood."""
    found = [json.loads(path.read_text()) for path in (folder / "run" / "faults").glob("*.json")]
    return {each["rank"]: each for each in found}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_holds_the_lock_of_the_interpreter_is_named_with_its_stack(file: Path) -> None:
    codes, told = with_fault(file.parent, _faulty, "lock")
    assert codes == [1, None], told
    assert "process 1 is silent" in told and "in hold_the_lock" in told
    assert records(file.parent).keys() == {0}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_stopped_is_named_and_the_command_ends(file: Path) -> None:
    started = subprocess.Popen(command(file), stderr=subprocess.PIPE, text=True)
    wait_for_steps(file.parent / "run", 6, started)
    for child in psutil.Process(started.pid).children():
        if child.environ().get("RANK") == "1":
            child.send_signal(signal.SIGSTOP)
    (code,), (told,) = ended(started)
    assert code == 1 and "process 1 is silent" in told and "Traceback" not in told
    assert records(file.parent).keys() == {0}


@pytest.mark.distributed
def test_a_rank_that_crashes_leaves_its_stack_and_the_others_records(file: Path) -> None:
    earlier = file.parent / "run" / "faults" / "earlier.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"rank": 7}')
    codes, told = with_fault(file.parent, _faulty, "segment")
    assert codes == [1, -signal.SIGSEGV], told
    assert "Fatal Python error: Segmentation fault" in told and "in string_at" in told
    assert "the other processes are gone" in told
    found = records(file.parent)  # those of earlier faults are kept
    assert found.keys() == {0, 7} and found[0]["what"] == "step" and found[0]["collectives"]


@pytest.mark.distributed
def test_a_rank_that_is_killed_while_it_generates_ends_the_others(tmp_path: Path) -> None:
    save_huggingface(Transformer(preset("tiny-gpt2")), tmp_path)
    codes, told = with_fault(tmp_path, _killed_while_generating)
    assert codes == [1, -signal.SIGKILL], told
    assert "error: the other processes are gone (" in told and "Traceback" not in told


@pytest.fixture
def two_machines() -> Iterator[list[list[str]]]:
    with network_namespaces.two_machines() as enters:
        yield enters


@pytest.mark.slow
@pytest.mark.distributed
def test_a_link_that_is_cut_is_an_error_on_all_ranks(
    file: Path, two_machines: list[list[str]]
) -> None:
    started = []
    for number, enter in enumerate(two_machines):
        agent = "--nnodes=2 --nproc-per-node=1 --master-addr=10.9.8.1 --master-port=29511"
        given = [*enter, sys.executable, "-m", "torch.distributed.run", *agent.split()]
        given += [f"--node-rank={number}", f"--local-addr=10.9.8.{number + 1}"]
        given += ["-m", "fusedops", "train", str(file)]
        network = os.environ | {"GLOO_SOCKET_IFNAME": "link0"}
        started.append(subprocess.Popen(given, stderr=subprocess.PIPE, text=True, env=network))
    wait_for_steps(file.parent / "run", 6, started[0])
    subprocess.run([*two_machines[0], "ip", "link", "set", "link0", "down"], check=True)
    for number, (code, told) in enumerate(zip(*ended(*started), strict=True)):
        assert code == 1, told
        named = f"process {number} waits in vain, and cannot reach the others"
        assert named in told or "process 1 is silent" in told, told
    assert records(file.parent).keys() == {0, 1}
