"""Ranks that run functions of tests: threads, processes that stay, and fresh processes.

| | ranks | for |
|---|---|---|
| ``@on_threads(size)`` | ``fusedops.testing.threads`` | values of any layout; the default |
| ``on_processes(function, size, *args)``, a fixture | gloo processes that stay | gloo, compilers |
| ``on_fresh_ranks(size, function, *args)`` | new gloo processes | kills, changed modules |

Each calls a function with the rank and the arguments in a world of ``size``. What a process runs
must belong to a module and return something that pickles. Starting a process means importing torch,
which takes longer than most tests: a fork server imports it once, and a process then starts in a
tenth of a second.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import unmeasured_guards

from fusedops.testing import threads
from fusedops.testing.processes import PRELOADED, Processes

RANKS = 8
# In seconds, by device. On a GPU a first call compiles kernels.
TIMEOUTS = {"cpu": 120.0, "cuda": 600.0}

CONTEXT = multiprocessing.get_context("forkserver")
# One server serves all tests. Modules of tests are not among these: until Python 3.13 the server
# does not know their folder, and does not report it.
MODULES = [
    *PRELOADED,
    "fusedops.cli.train",
    "fusedops.generation",
    "fusedops.train.loop",
    "psutil",
    "pytest",
    "torch._dynamo",
]
CONTEXT.set_forkserver_preload(MODULES)


def on_threads(size: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that every rank calls, on threads.

    Args:
        size: number of ranks, or the argument of the function that has it.
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            ranks = arguments[size] if isinstance(size, str) else size
            threads.run(lambda rank: function(rank, **arguments), ranks)

        _, *parameters = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated


class Pool:
    """Processes that stay; a context manager.

    Each run has a new world of the first ranks. With ``device="cuda"`` each rank has the GPU of its
    number, and NCCL. After a failure the next run starts other processes.
    """

    def __init__(self, ranks: int = RANKS, device: str = "cpu") -> None:
        self._processes, self._device = Processes(ranks), device
        CONTEXT.set_forkserver_preload(MODULES)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on the first ``size`` ranks; return the results by rank.

        Raises:
            RankError: a rank raised, died or did not answer.
        """
        return self._processes.run(
            _on_rank, size, self._device, function, *args, patience=TIMEOUTS[self._device]
        )


def _on_rank(rank: int, device: str, function: Callable[..., Any], *args: Any) -> Any:
    import torch

    unmeasured_guards.install()
    if device == "cuda":
        _connect_gpus(rank)
    torch.manual_seed(0)
    return function(rank, *args)


def _connect_gpus(rank: int) -> None:
    """Replace the world of gloo by one of NCCL."""
    import torch
    from torch import distributed as dist

    from fusedops.launch.processes import connect

    size = dist.get_world_size()
    store = dist.PrefixStore("cuda", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    timeout = timedelta(seconds=TIMEOUTS["cuda"] / 2)
    connect(torch.device("cuda", rank), store, rank, size, timeout)


def without_rank(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``."""
    return function(*args)


class World:
    """The rank and its groups, for functions that take these instead of a number."""

    def __init__(self, rank: int) -> None:
        from torch import distributed as dist

        size = dist.get_world_size()
        smaller = [number for number in (2, 4) if number < size]
        self.rank, self.groups = rank, {size: dist.group.WORLD}
        self.groups |= {number: dist.new_group(list(range(number))) for number in smaller}

    def member(self, size: int) -> bool:
        """Whether this rank belongs to the group of that size."""
        return self.rank < size

    def group(self, size: int) -> Any:
        """Return the group of the first ranks."""
        return self.groups[size]


def with_world(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(world, *args)``."""
    return function(World(rank), *args)


def on_fresh_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    patience: float = 300.0,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` on new gloo ranks, which it may kill.

    Args:
        ranks: number of ranks.
        function: belongs to a module.
        *args: of the function, after the rank.
        patience: seconds until a rank counts as hanging.
        timeout: of the process group in seconds; ``patience`` by default.

    Returns:
        What each rank returned; its traceback, ``"died"`` or ``"no answer"`` instead.
    """
    with tempfile.TemporaryDirectory(prefix="fusedops-") as folder:
        started = [
            start_process(
                _on_fresh_rank, rank, ranks, f"{folder}/store", timeout or patience, function, args
            )
            for rank in range(ranks)
        ]
        results = []
        for _, connection in started:
            try:
                results.append(connection.recv() if connection.poll(patience) else "no answer")
            except EOFError:
                results.append("died")
        for process, _ in started:
            process.kill()
            process.join()
    return results


def start_process(target: Callable[..., Any], *args: Any) -> tuple[Any, Connection]:
    """Start ``target(connection, *args)``; return the process and the other end."""
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run, args=(target, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def _run(target: Callable[..., Any], *args: Any) -> None:
    gc.freeze()  # garbage collections need not look at what the server has imported
    target(*args)


def _on_fresh_rank(
    connection: Connection,
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch
    from torch import distributed as dist

    from fusedops.launch.processes import connect

    torch.set_num_threads(1)
    device, limit = torch.device("cpu"), timedelta(seconds=timeout)
    connect(device, dist.FileStore(store, ranks), rank, ranks, limit)
    try:
        connection.send(function(rank, *args))
    except Exception:
        connection.send(traceback.format_exc())
    dist.destroy_process_group()
