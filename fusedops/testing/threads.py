"""Ranks as threads of this process, with all of torch.distributed between them.

``run(function, size)`` calls ``function(rank)`` in a thread per rank; inside it the world is
initialised, and groups, meshes, DTensor, DDP and FSDP2 work on CPU tensors as they do over gloo. A
world of eight takes milliseconds to set up, deadlocks and mismatched communications are errors
(``thread_collectives``), and a run is the same each time. Not covered: the backend's own order of
sums, and state of a process other than torch's random numbers (``random``, NumPy, the environment).

torch's own threaded world keeps the ranks' groups apart (it names it ``threaded``, which a mesh
asks for); the group itself is ours, because that one knows no sends and no unfinished work.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedops.testing.ranks import RankError
from fusedops.testing.thread_collectives import (
    AllOf,
    Tensors,
    ThreadCall,
    ThreadCollective,
    ThreadWork,
)
from fusedops.testing.thread_scheduler import StoppedError, ThreadScheduler

PATIENCE = 120.0
# Called when a rank takes part in a communication: with the rank, the name and the ranks of the
# group, and its part.
Observer = Callable[[int, str, tuple[int, ...], ThreadCall], None]
_NAME = "THREADED"
_one_at_a_time = threading.Lock()


class _Run:
    """What the groups of one run share: the scheduler and the collectives that are not full."""

    def __init__(self, size: int, seed: int, observe: Observer | None) -> None:
        self.scheduler = ThreadScheduler(size, seed)
        self.pending: dict[tuple[Any, ...], ThreadCollective] = {}
        self._observe = observe

    def join(
        self,
        key: tuple[Any, ...],
        ranks: tuple[int, ...],
        expected: int,
        rank: int,
        call: ThreadCall,
    ) -> ThreadWork:
        if self._observe is not None:
            self._observe(self.scheduler.rank, key[0], ranks, call)
        collective = self.pending.setdefault(key, ThreadCollective(expected))
        collective.join(rank, call)
        if collective.full():
            del self.pending[key]
        return ThreadWork(self.scheduler, collective, rank)


# Typed so because torch gives these methods several signatures; what it calls are these.
_ProcessGroup: Any = dist.ProcessGroup


class ThreadGroup(_ProcessGroup):
    """A process group of threads. Only ``run`` makes them."""

    def __init__(
        self, run: _Run, name: str, ranks: Sequence[int], rank: int, store: dist.Store
    ) -> None:
        super().__init__(rank, len(ranks))
        self._store = store
        self._run, self._key, self._ranks, self._mine = run, name, tuple(ranks), rank
        self._count: defaultdict[tuple[Any, ...], int] = defaultdict(int)

    def _start(
        self,
        kind: str,
        inputs: Tensors,
        outputs: Tensors,
        detail: Any = None,
        sizes: Sequence[int] = (),
    ) -> ThreadWork:
        self._count[()] += 1
        key = (self._key, self._ranks, self._count[()])
        where = f"rank {self._ranks[self._mine]} in the group of ranks {list(self._ranks)}"
        call = ThreadCall(kind, inputs, outputs, detail, tuple(sizes), where)
        return self._run.join(key, self._ranks, len(self._ranks), self._mine, call)

    @property
    def group_name(self) -> str:
        """The name that torch registers it by."""
        return self._key

    def get_group_store(self) -> dist.Store:
        """Return where the ranks of the group can leave word for each other."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries tensors of a device: this group those on the CPU.

        A stand-in for a GPU (``stand_in_device``) has its tensors in the memory of the CPU.
        """
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"ranks that are threads exchange tensors on the CPU, not {device}")
        return self

    def getBackendName(self) -> str:
        """Return the name that torch's meshes know threads by."""
        return _NAME.lower()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce in place."""
        how = _how(opts or dist.AllreduceOptions())
        return self._start("all_reduce", tensors, tensors, how, [t.numel() for t in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Reduce in place on one rank."""
        mine = tensors if self._mine == opts.rootRank else []
        sizes = [tensor.numel() for tensor in tensors]
        return self._start("reduce", tensors, mine, (_how(opts), opts.rootRank), sizes)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Copy one rank's tensors to all."""
        given, got = (tensors, []) if self._mine == opts.rootRank else ([], tensors)
        sizes = [tensor.numel() for tensor in tensors]
        return self._start("broadcast", given, got, opts.rootRank, sizes)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give all ranks each rank's tensor."""
        works = [
            self._start("all_gather", [given], got)
            for got, given in zip(outputs, inputs, strict=True)
        ]
        return works[0] if len(works) == 1 else AllOf(works)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Give all ranks each rank's tensor, one behind the other."""
        return self._start("all_gather", [given], _even(output, self.size()), None, [given.numel()])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Do several ``all_gather_single``."""
        pairs = zip(outputs, inputs, strict=True)
        return AllOf([self.all_gather_single(output, given) for output, given in pairs])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Give one rank each rank's tensor."""
        got = outputs[0] if self._mine == opts.rootRank else []
        return self._start("gather", inputs, got, opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Give each rank one of a rank's tensors."""
        given = inputs[0] if self._mine == opts.rootRank else []
        return self._start("scatter", given, outputs, opts.rootRank)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Reduce, and give each rank one part."""
        sizes = [tensor.numel() for tensor in inputs[0]]
        return self._start("reduce_scatter", inputs[0], outputs, _how(opts), sizes)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any
    ) -> dist.Work:
        """Reduce, and give each rank an equal part."""
        return self.reduce_scatter([output], [_even(given, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        """Do several ``reduce_scatter_single``."""
        pairs = zip(outputs, inputs, strict=True)
        return AllOf([self.reduce_scatter_single(output, given, opts) for output, given in pairs])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give each rank the tensor meant for it."""
        return self._start("all_to_all", inputs, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Give each rank the rows meant for it."""
        size = self.size()
        got = list(output.split(output_sizes)) if output_sizes else _even(output, size)
        sent = list(given.split(input_sizes)) if input_sizes else _even(given, size)
        return self._start("all_to_all", sent, got)

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        """Send to a rank of the group; ends when that one receives."""
        return self._pair("send", tensors, self._mine, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        """Receive from a rank of the group."""
        return self._pair("recv", tensors, source, self._mine, tag)

    def _pair(self, kind: str, tensors: Tensors, source: int, to: int, tag: int) -> dist.Work:
        self._count[kind, source, to, tag] += 1
        key = (self._key, self._ranks, source, to, tag, self._count[kind, source, to, tag])
        arrow = f"from rank {self._ranks[source]} to rank {self._ranks[to]}"
        given, got = (tensors, []) if kind == "send" else ([], tensors)
        sizes = tuple(tensor.numel() for tensor in tensors)
        call = ThreadCall(kind, given, got, None, sizes, arrow)
        # The sender is the first of the two, whatever their ranks are.
        return self._run.join(key, self._ranks, 2, 0 if kind == "send" else 1, call)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all."""
        return self._start("barrier", [], [])

    # Their names in torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _how(opts: Any) -> str:
    op = opts.reduceOp
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _even(given: torch.Tensor, parts: int) -> Tensors:
    return list(given.detach().view(-1).split(max(1, given.numel() // parts)))[:parts] or [
        given.detach().view(-1) for _ in range(parts)
    ]


def run(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    seed: int = 0,
    patience: float = PATIENCE,
    observe: Observer | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``size`` ranks; return their results by rank.

    Args:
        function: what a rank does.
        size: number of ranks.
        args: passed on.
        seed: of the order in which the ranks run.
        patience: seconds until a run that does not end is given up.
        observe: called when a rank starts its part of a communication.

    Raises:
        RankError: a rank raised, or all wait for each other; it tells which and why.
    """
    run = _Run(size, seed, observe)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def body(rank: int) -> None:
        try:
            dist.init_process_group(
                _NAME.lower(),
                rank=rank,
                world_size=size,
                store=store,
                timeout=timedelta(seconds=patience),
            )
            results[rank] = function(rank, *args)
        except StoppedError:
            pass
        except BaseException as error:
            errors[rank] = error
            run.scheduler.fail(f"rank {rank} has failed")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _one_at_a_time, _world(run):
        try:
            run.scheduler.run([functools.partial(body, rank) for rank in range(size)], patience)
        except TimeoutError as error:
            raise RankError(str(error), {}) from None
    if errors or run.scheduler.failure:
        tracebacks = {
            rank: "".join(traceback.format_exception(error)) for rank, error in errors.items()
        }
        raise RankError(run.scheduler.failure or "", tracebacks, errors)
    return results


@contextlib.contextmanager
def _world(run: _Run) -> Iterator[None]:
    """Each thread has groups of its own, made by us."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def create(options: Any, _: Any) -> ThreadGroup:
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        return ThreadGroup(run, options.group_id, ranks, options.group_rank, options.store)

    plugin = type(c10d.Backend._plugins[_NAME])(create, True)
    library: Any = torch._C._distributed_c10d  # whose stubs do not have it
    isolated = library._set_thread_isolation_mode
    with (
        mock.patch.dict(c10d.Backend._plugins, {_NAME: plugin}),
        mock.patch.object(c10d, "_world", threaded.ThreadLocalWorld()),
        mock.patch.object(sys, "excepthook", sys.excepthook),  # torch puts the rank before it
    ):
        isolated(True)
        try:
            yield
        finally:
            isolated(False)
