"""Runs a function in fresh processes, one or several on gloo, and never hangs.

Trainers keep global state (accelerate's singletons, DeepSpeed's groups, environment variables), so
each run has processes of its own. A fork server has imported it all once: without it a
process would take ten seconds to start. What runs must be a function of a module.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = ProcessPoolExecutor(processes, mp_context=CONTEXT)
    try:
        ranks = [
            pool.submit(_serve, rank, processes, port, function, args) for rank in range(processes)
        ]
        # The first failure is enough: the others would wait for that rank.
        done, waiting = wait(ranks, TIMEOUT, FIRST_EXCEPTION)
        results = {future: pickle.loads(future.result()) for future in done}
        assert not waiting, f"{len(waiting)} of {processes} ranks gave no answer in {TIMEOUT} s"
        return [results[future] for future in ranks]
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown()


def _serve(rank: int, processes: int, port: int, function: Any, args: Any) -> bytes:
    """Return the result by value: a tensor would be shared with a process that has ended."""
    if processes > 1:
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
        return pickle.dumps(function(*args))
    except BaseException:
        raise AssertionError(f"rank {rank}: {traceback.format_exc()}") from None
