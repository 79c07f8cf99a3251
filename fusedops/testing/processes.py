"""Ranks as gloo processes that stay for the next case.

Starting a process means importing torch, which takes longer than most cases: a fork server imports
it once, and the processes stay. Each run has a new world of the first ``size`` ones: what an
earlier run left behind cannot reach it. What a rank is sent must be a function of a module.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fusedops._core import env
from fusedops.launch.processes import connect
from fusedops.testing.ranks import RankError

PATIENCE = 120.0
# What a function returned; or its traceback and, where it pickles, what it raised.
_Answer = tuple[Any, str, BaseException | None]
# What a rank would import first: five seconds of each process, which the fork server spends once.
PRELOADED = ("torch.distributed.tensor.debug", "torch.distributed.fsdp", "fusedops.testing")


class Processes:
    """A pool of gloo processes for worlds of up to ``size``, a context manager."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._size, self._context = size, context
        self._folder = tempfile.TemporaryDirectory()
        self._worlds = itertools.count()
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._folder.cleanup()

    def run(
        self, function: Callable[..., Any], size: int, *args: Any, patience: float = PATIENCE
    ) -> list[Any]:
        """Call ``function(rank, *args)`` on ``size`` ranks; return their results by rank.

        Raises:
            RankError: a rank raised, died or did not answer; new processes then replace all ranks.
        """
        try:
            job = pickle.dumps((function, args))
        except (AttributeError, pickle.PicklingError, TypeError) as error:
            raise TypeError(
                f"verify: what processes run must consist of functions of modules, got {error}"
            ) from None
        self._start()
        store = str(Path(self._folder.name) / f"world{next(self._worlds)}")
        for rank, (_, connection) in enumerate(self._members[:size]):
            connection.send((job, store, rank, size, patience))
        deadline = time.monotonic() + patience
        results: list[Any] = []
        tracebacks: dict[int, str] = {}
        errors: dict[int, BaseException] = {}
        for rank, (_, connection) in enumerate(self._members[:size]):
            try:
                # Where one has failed the others may wait for it until their own patience ends.
                left = min(5.0, patience) if tracebacks else max(0.0, deadline - time.monotonic())
                if not connection.poll(left):
                    within = "" if tracebacks else f" in {patience:.0f} s"
                    tracebacks[rank] = f"no answer{within}"
                    continue
                result, report, raised = connection.recv()
            except (EOFError, ConnectionResetError):
                tracebacks[rank] = "the process has ended"
                continue
            results.append(result)
            if report:
                tracebacks[rank] = report
            if raised is not None:
                errors[rank] = raised
        if tracebacks:
            self._close()
            raise RankError("", tracebacks, errors)
        return results

    def _close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members = []

    def _start(self) -> None:
        new = []
        while len(self._members) < self._size:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, mine))
            new.append(mine)
        for connection in new:  # a busy machine may take long: no rank's patience pays for it
            connection.recv()


def _serve(connection: Connection) -> None:
    import torch

    gc.freeze()  # garbage collections need not look at what the server has imported
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            job, store, rank, size, patience = connection.recv()
        except EOFError:
            return
        try:
            function, args = pickle.loads(job)
            with _world(store, rank, size, patience):
                answer: _Answer = function(rank, *args), "", None
        except BaseException as error:
            answer = None, traceback.format_exc(), error if _pickles(error) else None
        connection.send(answer)


@contextlib.contextmanager
def _world(store: str, rank: int, size: int, patience: float) -> Any:
    import torch
    from torch import distributed as dist

    env.set_launched(rank, size)
    timeout = timedelta(seconds=patience / 2)
    connect(torch.device("cpu"), dist.FileStore(store, size), rank, size, timeout)
    with contextlib.suppress(ImportError):
        # DTensor's cache would find equal meshes of earlier worlds, whose groups have ended.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    # A rank that has ended closes its connections: all must have connected, and have received.
    dist.barrier()
    try:
        yield
        with contextlib.suppress(RuntimeError):  # of a rank that failed
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _pickles(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
