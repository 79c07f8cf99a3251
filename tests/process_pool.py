"""Processes that run functions of tests: a pool for the test session, or fresh ones, on gloo.

Starting a process means importing torch, which takes longer than most tests: a fork server imports
it once, and a process then starts in a tenth of a second. A function that a test sends must belong
to a module and return something that pickles.

``Pool`` keeps its ranks, their world and its groups from test to test, unlike
``fusedops.testing.processes``; tests on fewer ranks use the first ones. Its ranks may also have a
GPU each, with NCCL. ``on_fresh_ranks`` starts ranks for one call, for tests that kill them or
change modules in them.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import unmeasured_guards

from fusedops.testing.processes import PRELOADED

RANKS = 8
SIZES = (1, 2, 4, 8)
# In seconds, by device. On a GPU a first call compiles kernels.
TIMEOUTS = {"cpu": 120.0, "cuda": 600.0}
# Each group has a thread that wakes a hundred times a second, and meshes that DTensor has cached
# keep theirs: after so many new processes are cheaper.
MOST_GROUPS = 40

CONTEXT = multiprocessing.get_context("forkserver")
# One server serves all tests. Modules of tests are not among these: until Python 3.13 the server
# does not know their folder, and does not report it.
CONTEXT.set_forkserver_preload(
    [
        *PRELOADED,
        "fusedops.cli.train",
        "fusedops.generation",
        "fusedops.train.loop",
        "psutil",
        "pytest",
        "torch._dynamo",
    ]
)


class World:
    """What a rank knows: its number and its groups."""

    def __init__(self, rank: int) -> None:
        from torch import distributed as dist

        self.rank = rank
        sizes = [size for size in SIZES if size <= dist.get_world_size()]
        self.groups = {size: dist.new_group(list(range(size))) for size in sizes}
        self._meshes: dict[tuple[int, ...], Any] = {}

    def member(self, size: int) -> bool:
        """Whether this rank belongs to the group of that size."""
        return self.rank < size

    def group(self, *shape: int) -> Any:
        """Return the first ranks as a group, or as a mesh ``[nodes, ranks of a node]``.

        All ranks make a mesh, also those outside of it.
        """
        if len(shape) == 1:
            return self.groups[shape[0]]
        if shape not in self._meshes:
            import torch
            from torch.distributed.device_mesh import DeviceMesh

            ranks = torch.arange(shape[0] * shape[1]).view(shape)
            self._meshes[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=("node", "local"))
        return self._meshes[shape]


class Pool:
    """The processes, and a connection to each: the first run starts them.

    After a failure, and where they hold too many groups, the next run starts others. With
    ``device="cuda"`` each rank has the GPU of its number.
    """

    def __init__(self, folder: Path, ranks: int = RANKS, device: str = "cpu") -> None:
        self._ranks, self._device = ranks, device
        self._stores = (str(folder / f"store{each}") for each in itertools.count())
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def _start(self) -> None:
        store = next(self._stores)
        for rank in range(self._ranks):
            process, connection = start_process(_serve, rank, self._ranks, store, self._device)
            self._processes.append(process)
            self._connections.append(connection)
        self._collect()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(world, *args)`` on every rank; returns the results by rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        return self._collect()

    def _collect(self) -> list[Any]:
        """Wait for an answer of every rank; raise if one failed."""
        timeout = TIMEOUTS[self._device]
        deadline = time.monotonic() + timeout
        results, failures, groups = [], [], 0
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank}: no answer in {timeout} s")
                    continue
                failed, value, made = connection.recv()
                groups = max(groups, made)
            except EOFError:
                failed, value = True, "the process has ended"
            results.append(value)
            if failed:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        if groups > MOST_GROUPS:
            self.close()
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _serve(connection: Connection, rank: int, ranks: int, store: str, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch import distributed as dist

    from fusedops.launch.processes import connect

    torch.set_num_threads(1)
    unmeasured_guards.install()
    if device == "cuda":
        torch.cuda.set_device(rank)
    connect(
        torch.device("cuda", rank) if device == "cuda" else torch.device("cpu"),
        dist.FileStore(store, ranks),
        rank,
        ranks,
        timedelta(seconds=TIMEOUTS[device] / 2),
    )
    world = World(rank)
    connection.send((False, None, _groups()))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            connection.send((False, function(world, *args), _groups()))
        except BaseException:
            connection.send((True, traceback.format_exc(), _groups()))


def _groups() -> int:
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


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
    connection: Any,
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        connection.send(function(rank, *args))
    except Exception:
        connection.send(traceback.format_exc())
    dist.destroy_process_group()
