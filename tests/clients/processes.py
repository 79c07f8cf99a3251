"""Runs a function in fresh processes, one or several on gloo, and never hangs.

Trainers keep global state (accelerate's singletons, DeepSpeed's groups, environment variables), so
each run has processes of its own. A fork server has imported it all once: without it a
process would take ten seconds to start. What runs must be a function of a module.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 600.0

CONTEXT = multiprocessing.get_context("forkserver")
# Whatever takes long to import; nothing of it computes when it is imported.
PRELOADED = (
    *("deepspeed", "fusedops.integrations", "lightning", "peft", "torch.distributed.tensor"),
    *("torchao", "transformers.models.llama.modeling_llama", "transformers.trainer"),
    "trl.trainer.sft_trainer",
)


def run(function: Callable[..., Any], *args: Any, processes: int = 1) -> list[Any]:
    """Call ``function(*args)`` in each process; return the results by rank.

    Several processes find each other by the environment variables of ``torchrun``, and start no
    group: that is the trainer's work, or ``torch.distributed.init_process_group("gloo")``'s.
    """
    # Here and not on import: the server is that of the process, for other tests' processes as well.
    CONTEXT.set_forkserver_preload(list(PRELOADED))
    port = _free_port()
    started, connections = [], []
    for rank in range(processes):
        mine, theirs = CONTEXT.Pipe()
        place = (rank, processes, port) if processes > 1 else None
        # Not daemons, which may not start processes: compilers do.
        process = CONTEXT.Process(target=_serve, args=(theirs, place, function, args))
        process.start()
        theirs.close()
        started.append(process)
        connections.append(mine)
    try:
        return _collect(connections)
    finally:
        for process in started:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _collect(connections: list[Connection]) -> list[Any]:
    """Wait for every rank's answer; the first failure is enough: the others would wait for it."""
    deadline = time.monotonic() + TIMEOUT
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {each: rank for rank, each in enumerate(connections) if rank not in results}
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), timeout=left)
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())}: no answer in {TIMEOUT} s")
        for connection in ready:
            rank = waiting[connection]
            try:
                failed, value = connection.recv()
            except EOFError:
                failed, value = True, "the process has ended"
            if failed:
                raise AssertionError(f"rank {rank}: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _serve(
    connection: Connection, place: tuple[int, int, int] | None, function: Any, args: Any
) -> None:
    if place is not None:
        rank, processes, port = place
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        connection.send((False, function(*args)))
    except BaseException:
        connection.send((True, traceback.format_exc()))
