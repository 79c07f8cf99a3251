"""The watchdog of a job whose second rank sleeps: it names the rank, and both processes end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from run_ranks import CONTEXT
from short_training import Training, build, make_steps, model_config
from torch import distributed as dist

from fusedops.launch.processes import initialize_distributed
from fusedops.launch.watchdog import Watchdog

TRAINING = Training(model_config("tiny-llama"), {"dp": 2, "zero": 1})
STEPS = 3
HANGING_SECONDS = 5.0
PATIENCE_SECONDS = 300.0  # the first steps compile kernels on a GPU


def _sleep() -> None:
    while True:
        time.sleep(0.1)


def _job(rank: int, port: int, folder: Path, device: str) -> None:
    """Train as one of two processes that a launcher starts; the second sleeps in the last step."""
    messages = os.open(_messages(folder, rank), os.O_CREAT | os.O_WRONLY)
    os.dup2(messages, sys.__stderr__.fileno())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with initialize_distributed(device) as ranks:
        engine, optimizer = build(device, TRAINING)
        make_steps(device, engine, optimizer, TRAINING, range(STEPS))
        with Watchdog(ranks, folder, HANGING_SECONDS) as watchdog:
            watchdog.set_phase(STEPS, "step")
            if rank == 1:
                _sleep()
            make_steps(device, engine, optimizer, TRAINING, [STEPS])


def _messages(folder: Path, rank: int) -> Path:
    return folder / f"messages-{rank}"


@pytest.mark.distributed
def test_a_rank_that_sleeps_is_named_and_the_job_ends(device: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        CONTEXT.Process(target=_job, args=(rank, store.port, tmp_path, device)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    text = "".join(_messages(tmp_path, rank).read_text() for rank in range(2))
    assert codes == [1, 1], text
    assert f"process 1 is hanging in step {STEPS}" in text and "in _sleep" in text
