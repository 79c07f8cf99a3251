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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedops.testing.ranks import RankError
from fusedops.testing.thread_collectives import Tensors, ThreadCall, ThreadCollective, ThreadWork
from fusedops.testing.thread_scheduler import StoppedError, ThreadScheduler

PATIENCE = 120.0
# Called when a rank takes part in a communication: with the rank, the name and the ranks of the
# group, and its part.
Observer = Callable[[int, str, tuple[int, ...], ThreadCall], None]
_NAME = "THREADED"
_one_at_a_time = threading.Lock()


@dataclass
class _Run:
    """What the groups of one run share."""

    scheduler: ThreadScheduler
    observe: Observer | None
    # The collectives that are not full, by group, ranks and number
    pending: dict[tuple[Any, ...], ThreadCollective] = field(default_factory=dict)


# Typed so because torch gives these methods several signatures; what it calls are these.
_ProcessGroup: Any = dist.ProcessGroup


class _ThreadGroup(_ProcessGroup):
    """A process group of threads; its methods are those that ``torch.distributed`` calls."""

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
        where = f"rank {self._ranks[self._mine]} in the group of ranks {list(self._ranks)}"
        call = ThreadCall(kind, inputs, outputs, detail, tuple(sizes), where)
        return self._join((self._count[()],), len(self._ranks), self._mine, call)

    def _join(
        self, number: tuple[int, ...], expected: int, rank: int, call: ThreadCall
    ) -> ThreadWork:
        """Take part as one of ``expected`` ranks in the communication of this number."""
        run, key = self._run, (self._key, self._ranks, *number)
        if run.observe is not None:
            run.observe(run.scheduler.rank, self._key, self._ranks, call)
        collective = run.pending.setdefault(key, ThreadCollective(expected))
        collective.join(rank, call)
        if collective.full():
            del run.pending[key]
        return ThreadWork(run.scheduler, [(collective, rank)])

    @property
    def group_name(self) -> str:
        return self._key

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries tensors of a device: this group those on the CPU.

        A stand-in for a GPU (``stand_in_device``) has its tensors in the memory of the CPU.
        """
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"ranks that are threads exchange tensors on the CPU, not {device}")
        return self

    def getBackendName(self) -> str:
        return _NAME.lower()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> ThreadWork:
        how = _how(opts or dist.AllreduceOptions())
        return self._start("all_reduce", tensors, tensors, how, _sizes(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> ThreadWork:
        mine = tensors if self._mine == opts.rootRank else []
        return self._start("reduce", tensors, mine, (_how(opts), opts.rootRank), _sizes(tensors))

    def broadcast(self, tensors: Tensors, opts: Any) -> ThreadWork:
        given, got = (tensors, []) if self._mine == opts.rootRank else ([], tensors)
        return self._start("broadcast", given, got, opts.rootRank, _sizes(tensors))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ThreadWork:
        return self._start("all_gather", inputs, outputs[0])

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> ThreadWork:
        return self._start("all_gather", [given], _even(output, self.size()), None, [given.numel()])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> ThreadWork:
        return self._together(map(self.all_gather_single, outputs, inputs))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> ThreadWork:
        got = outputs[0] if self._mine == opts.rootRank else []
        return self._start("gather", inputs, got, opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> ThreadWork:
        given = inputs[0] if self._mine == opts.rootRank else []
        return self._start("scatter", given, outputs, opts.rootRank)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> ThreadWork:
        return self._start("reduce_scatter", inputs[0], outputs, _how(opts), _sizes(inputs[0]))

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any
    ) -> ThreadWork:
        return self.reduce_scatter([output], [_even(given, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> ThreadWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._together(self.reduce_scatter_single(*pair, opts) for pair in pairs)

    def _together(self, works: Iterable[ThreadWork]) -> ThreadWork:
        parts = [part for work in works for part in work.parts]
        return ThreadWork(self._run.scheduler, parts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ThreadWork:
        return self._start("all_to_all", inputs, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> ThreadWork:
        size = self.size()
        got = list(output.split(output_sizes)) if output_sizes else _even(output, size)
        sent = list(given.split(input_sizes)) if input_sizes else _even(given, size)
        return self._start("all_to_all", sent, got)

    def send(self, tensors: Tensors, to: int, tag: int) -> ThreadWork:
        return self._pair("send", tensors, self._mine, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> ThreadWork:
        return self._pair("recv", tensors, source, self._mine, tag)

    def _pair(self, kind: str, tensors: Tensors, source: int, to: int, tag: int) -> ThreadWork:
        self._count[kind, source, to, tag] += 1
        number = (source, to, tag, self._count[kind, source, to, tag])
        arrow = f"from rank {self._ranks[source]} to rank {self._ranks[to]}"
        given, got = (tensors, []) if kind == "send" else ([], tensors)
        call = ThreadCall(kind, given, got, None, _sizes(tensors), arrow)
        # The sender is the first of the two, whatever their ranks are.
        return self._join(number, 2, 0 if kind == "send" else 1, call)

    def barrier(self, opts: Any = None) -> ThreadWork:
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


def _sizes(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _even(given: torch.Tensor, parts: int) -> Tensors:
    return list(given.detach().view(-1).tensor_split(parts))


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
    run = _Run(ThreadScheduler(size, seed), observe)
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
    """Each rank has groups of its own, made by us whatever backend is asked for."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    class Worlds(threaded.ThreadLocalWorld):
        def _get_world(self) -> Any:
            _ = run.scheduler.rank  # raises in another thread, which has no groups
            return super()._get_world()

    def create(options: Any, _: Any) -> _ThreadGroup:
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        return _ThreadGroup(run, options.group_id, ranks, options.group_rank, options.store)

    @functools.wraps(c10d.new_group)
    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return make_group(*args, **kwargs)

    make_group = c10d.new_group

    plugin = type(c10d.Backend._plugins[_NAME])(create, True)
    library: Any = torch._C._distributed_c10d  # whose stubs do not have it
    isolated = library._set_thread_isolation_mode
    with (
        mock.patch.dict(c10d.Backend._plugins, {_NAME: plugin}),
        mock.patch.object(c10d, "_world", Worlds()),
        mock.patch.object(c10d, "new_group", new_group),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(sys, "excepthook", sys.excepthook),  # torch puts the rank before it
    ):
        isolated(True)
        try:
            yield
        finally:
            isolated(False)
