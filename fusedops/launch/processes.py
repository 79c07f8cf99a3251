"""The processes of a run: joining them, failing together, stopping together, starting them.

Torch's elastic agent (``torchrun``) starts the processes and ends all when one fails. In addition,
a mistake of the user is reported once and ends all processes in the same way, and after SIGTERM
every process finishes the same step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from fusedops._core import env
from fusedops._core.checks import UnsupportedError
from fusedops._core.device_tensors import device_tensor
from fusedops.launch.config_table import InputError
from fusedops.launch.job import RendezvousError, check_address, join_job
from fusedops.launch.start_checks import check, exchange, own_place, shown_ranks
from fusedops.parallel.collective_errors import gather_objects, raise_on_all
from fusedops.parallel.comm import collectives, host_groups
from fusedops.runtime import host

# What the other processes get to end by themselves when one has ended badly after a signal: as
# torchrun's.
_GRACE_SECONDS = 30.0
# Collectives that a process remembers, for the record that a fault leaves (``flight_record.py``).
_REMEMBERED = 1000
# A process gets one Ctrl-C twice, from its terminal and from its parent.
_SAME_REQUEST_SECONDS = 2.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# In which rank 0 must listen: nodes start one after the other, and may have to load an image first.
_CONNECTION = timedelta(minutes=10)
# After which a process that waits for them tells it.
_UNTOLD_SECONDS = 5.0
_FOR_EVER = timedelta(days=365)
_MISTAKES = (ValueError, TypeError, UnsupportedError, OSError)


@dataclass(eq=False)
class Ranks:
    """The processes that train together."""

    rank: int  # of this process
    size: int  # the number of processes
    device: torch.device  # of this process
    store: dist.Store  # of the rendezvous

    @property
    def description(self) -> str:
        """How many processes there are, and on what."""
        count = "1 process" if self.size == 1 else f"{self.size} processes"
        return f"{count} on {self.device.type}"

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks, as an ``InputError``, the first mistake that one of them raises.

        What is inside must not communicate.
        """
        group = dist.group.WORLD if self.size > 1 else None
        with raise_on_all(_MISTAKES, lambda errors: InputError(next(iter(errors.values()))), group):
            yield

    @contextlib.contextmanager
    def first(self) -> Iterator[bool]:
        """Let rank 0 do what may take hours, while the others wait without a collective.

        A collective would end after its timeout. Gives whether this is rank 0; the others leave the
        block after rank 0 has.
        """
        turn = self.store.add(f"fusedops/first/turn of {self.rank}", 1)
        key = f"fusedops/first/{turn}"
        try:
            yield self.rank == 0
        finally:
            if self.rank == 0:
                self.store.set(key, "done")
        pause = 0.01
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank gave, on all ranks."""
        return gather_objects(value, dist.group.WORLD if self.size > 1 else None)

    def check_equal(self, values: Mapping[str, Any]) -> None:
        """Raise on all ranks unless all of them gave the same values, by name; all call this.

        Raises:
            InputError: they did not; the message has the names that differ, and the ranks.
        """
        given = self.gathered(
            {name: json.dumps(value, default=str) for name, value in values.items()}
        )
        differences = []
        for name in sorted({name for of_rank in given for name in of_rank}):
            ranks_of: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(given):
                ranks_of.setdefault(of_rank.get(name, "not set"), []).append(rank)
            if len(ranks_of) > 1:
                places = (f"{value} on {shown_ranks(ranks)}" for value, ranks in ranks_of.items())
                differences.append(f"{name} is {', '.join(places)}")
        if differences:
            raise InputError(
                "all processes must be started with the same configuration, data and versions: "
                f"{'; '.join(differences)}"
            )

    def total(self, *values: float) -> list[float]:
        """Return the sums of numbers over all ranks, in float64; waits for a GPU."""
        return self.summed(device_tensor(values, torch.float64, self.device)).tolist()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of a tensor on ``device`` over all ranks, without a wait of the host."""
        if self.size == 1:
            return values
        world: Any = dist.group.WORLD
        return collectives.all_reduce(values, world, label="losses").wait()


@contextlib.contextmanager
def initialize_distributed(device: str) -> Iterator[Ranks]:
    """Join the processes that a launcher started, or run alone; ``device`` may be ``"auto"``.

    Raises:
        InputError: there is no such device, or the launcher's variables (``job.py``) are wrong.
        RendezvousError: this process cannot reach the others.
    """
    made = not dist.is_initialized()
    hook, failed = sys.excepthook, True
    if made:
        join_job()
    rank, size, local = env.launched() or (0, 1, 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if count and device != "cpu" else "cpu"
    # Slurm's --gpus-per-task shows each process its own GPU only.
    index = 0 if count == 1 else local
    here = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    if kind == "cuda" and index < count:
        torch.cuda.set_device(here)
    place = own_place(here, _device_problem(device, kind, local, count))
    if made:
        env.set_flight_records(_REMEMBERED)
        with _waiting_shown(rank, size):
            store = _store()
            check(exchange(place, store, rank, size))
            connect(here, store, rank, size)
    try:
        store = dist.distributed_c10d._get_default_store()
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), here, store)
        if not made:
            check(exchange(place, store, ranks.rank, ranks.size))
        yield ranks
        failed = False
    finally:
        if made:
            dist.destroy_process_group()
            # Each group puts a hook that prefixes tracebacks with the rank before the one that is
            # there. Where one of several processes fails, it stays for the traceback.
            if size == 1 or not failed:
                sys.excepthook = hook


def _device_problem(device: str, kind: str, local: int, count: int) -> str:
    """Return why a process cannot take its device; empty if it can."""
    if device == "cuda" and not count:
        return "config: device must be 'cpu' here, got 'cuda': torch sees no GPU (fusedops doctor)"
    if kind == "cuda" and local >= count > 1:
        return (
            f"{local + 1} processes on a machine need as many GPUs there, and torch sees {count}: "
            "start fewer, or set device to cpu"
        )
    return ""


def connect(
    device: torch.device,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta | None = None,  # of collectives; by default torch's
) -> None:
    """Initialise torch.distributed.

    NCCL connects now, since it knows the device, and later groups are split from this one. Hosts
    get one group over gloo; the groups of a mesh have none unless something asks for it
    (``host_groups``).
    """
    given: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": timeout}
    if device.type == "cpu":
        dist.init_process_group("gloo", **given)
    elif size == 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", **given)
    else:
        dist.init_process_group("nccl", device_id=device, **given)
        world: Any = dist.group.WORLD
        host_groups.register(world, dist.new_group(timeout=timeout, backend="gloo"))


def set_collective_timeout(seconds: float) -> None:
    """Set the timeout of all collectives to twice that of the watchdog, which says who hangs.

    Torch's own timeout (30 minutes for gloo, 10 for NCCL) does not say who; it is never shortened.

    Args:
        seconds: timeout of the watchdog; 0: there is none, and collectives may take a year.
    """
    timeout = timedelta(seconds=2 * seconds) if seconds else _FOR_EVER
    for group in dist.distributed_c10d._world.pg_map:
        for kind in group._device_types:
            backend: Any = group._get_backend(kind)
            if backend.options._timeout < timeout:
                backend._set_default_timeout(timeout)


@contextlib.contextmanager
def _waiting_shown(rank: int, size: int) -> Iterator[None]:
    """Print what this process waits for if the others do not come soon.

    Variables that an ended launcher has left in a shell look like those of a job. Torchrun's agents
    start all processes together.
    """
    if size == 1 or env.has_agent():
        yield
        return
    given = {name: text for name, text in env.job_variables().items() if "SLURM" not in name}
    address = f"{given.get('MASTER_ADDR')}:{given.get('MASTER_PORT')}"
    others = "the other processes at" if rank == 0 else "rank 0 at"
    message = (
        f"fusedops: rank {rank} of {size} waits for {others} {address}, for at most "
        f"{_CONNECTION.total_seconds() / 60:g} minutes, because the environment has "
        f"{', '.join(f'{name}={text}' for name, text in given.items())}; to run on one process: "
        f"unset {' '.join(given)}"
    )
    timer = threading.Timer(_UNTOLD_SECONDS, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store() -> dist.Store:
    """Return where the processes find each other.

    The agent's store outlives them: without a prefix, restarted processes would read the addresses
    of dead ones.
    """
    given, place = env.job_variables(), env.launched()
    if place is None or (place[1] == 1 and "MASTER_ADDR" not in given):
        return dist.HashStore()
    check_address(given)
    address = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    try:
        store, *_ = next(rendezvous("env://", timeout=_CONNECTION))
        store.set_timeout(default_pg_timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            message = f"another process listens on {address}: set MASTER_PORT to a free port"
            raise InputError(message) from None
        seconds = _CONNECTION.total_seconds()
        raise RendezvousError(
            f"not all of {place[1]} processes came to {address} within {seconds:g} seconds: have "
            "all machines started theirs, and can they reach this one?"
            if place[0] == 0
            else f"process {place[0]} cannot reach rank 0 at {address}: is MASTER_ADDR the machine "
            "of rank 0, has it started, and can this machine reach it?"
        ) from None
    return dist.PrefixStore(f"fusedops-{env.restarts()}", store)


class StopSignals:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C instead of dying: the loop saves and ends after its step.

    A second SIGTERM or Ctrl-C, later than two seconds, ends the process. SIGUSR1 is what Slurm
    sends before the time limit (``--signal=USR1@90``); the SIGTERM at the limit may then arrive
    while the process saves, and does not end it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._since: float | None = None  # when SIGTERM or Ctrl-C arrived first
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _STOPS:
            # Only the main thread may; elsewhere a run is stopped by its caller.
            with contextlib.suppress(ValueError):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now, self.asked = time.monotonic(), True
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        if self._since is None:
            self._since = now
        elif now - self._since > _SAME_REQUEST_SECONDS:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)


def launch(
    processes: int, arguments: Sequence[str], *, restarts: int = 0, stop_code: int = 0
) -> int:
    """Run ``fusedops`` with these arguments on several processes of this machine.

    With ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT`` set, they
    join those that other machines start.

    What ``torchrun --nproc-per-node N -m fusedops ARGUMENTS`` does; SIGTERM, SIGUSR1 and Ctrl-C are
    passed on, and this process waits until the others have saved, however long that takes.

    Args:
        processes: the number of processes.
        arguments: the arguments of the command.
        restarts: how often all are restarted when one fails.
        stop_code: the exit code of a process that was asked to stop and has saved.

    Returns:
        The exit code: 0, ``stop_code``, or the first one of a process that failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    received: list[int] = []
    env.set_threads(max(1, len(host.allowed_cpus()) // processes))
    # A failed process has reported why; the agent's tables of tracebacks would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    options += [] if env.has_nodes() else ["--standalone"]
    # The agent would give processes thirty seconds to write a checkpoint.
    options += ["--signals-to-handle=SIGQUIT", "-m", "fusedops", *arguments]
    for number in _STOPS:
        signal.signal(number, partial(_forward_signal, stop_code, received))
    try:
        run(parse_args(options))
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # The agent ends the others by SIGTERM; a process killed otherwise could not report it.
        killed = {rank: -code for rank, code in codes.items() if code < 0}
        causes = {rank: code for rank, code in killed.items() if code != signal.SIGTERM}
        # If one process reported its reason, those ended by SIGTERM need none.
        explained = any(code > 0 for code in codes.values())
        for rank, code in (causes if causes or explained else killed).items():
            name = signal.Signals(code).name
            print(f"fusedops: error: process {rank} was killed: {name}", file=sys.stderr)
        return next((code for code in codes.values() if code > 0), 1)
    return 0


def _forward_signal(
    stop_code: int, received: list[int], number: int, _: FrameType | None
) -> NoReturn:
    """Pass a signal on to the processes, wait until they have ended, and exit.

    The agent must not see them end: it would take that for a failure, and restart them. Another
    signal may come while one is handled; ``received`` gets all of them.
    """
    import psutil

    received.append(number)
    codes: list[int] = []
    alive, deadline = psutil.Process().children(), math.inf
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
    while alive:
        gone, alive = psutil.wait_procs(alive, timeout=1.0)
        codes += [process.returncode or 0 for process in gone]
        # One that had not come as far as to note the signal leaves the others without it.
        if set(codes) - {0, stop_code}:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    failed = [code for code in codes if code > 0 and code != stop_code]
    killed = any(code < 0 for code in codes) or not codes
    if failed or (killed and len(received) > 1):
        raise SystemExit(failed[0] if failed else 1)
    if killed:
        message = "stopped before the first step; the same command starts or resumes it"
        print(f"fusedops: {message}", file=sys.stderr)
        raise SystemExit(stop_code)
    raise SystemExit(max(codes))
