"""Every communication of the stack: one function per kind, which counts it and logs it.

Each function starts the communication and returns a ``Pending``; ``wait()`` gives the result. What
runs between the two overlaps it. ``label`` names a communication in the log (``log.py``).

Processes of one machine communicate through shared memory where they can (``shared_memory.py``).

A sum over ranks is ordered where we make it ourselves (``all_reduce_ordered``, ``all_reduce``
through shared memory, ``reduce_scatter`` where ``sums_in_order`` says so): neighbours first, then
pairs of them, in the accumulation dtype, rounded once. Its bits then depend neither on the backend
nor on how a tensor is cut into pieces. Nothing here is differentiable; ``tensor/layers.py`` has the
autograd nodes.

Tensors on the meta device have no data: reductions, gathers and exchanges of them are logged and
not sent. So a planner counts what a model would send, without its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusedops._core import checks, dtypes
from fusedops._core.collectives import all_gather_single, reduce_scatter_single
from fusedops.parallel.comm.log import COMPUTE as COMPUTE
from fusedops.parallel.comm.log import ComputeSpan as ComputeSpan
from fusedops.parallel.comm.log import Event as Event
from fusedops.parallel.comm.log import Log as Log
from fusedops.parallel.comm.log import computing as computing
from fusedops.parallel.comm.log import note as note
from fusedops.parallel.comm.log import record_start, wait_recorded
from fusedops.parallel.comm.log import recorded as recorded
from fusedops.runtime import shared_memory

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
OPS = ("sum", "avg", "max", "min", "product")


class Pending:
    """A started communication. Wait once; its buffers must not be touched until then."""

    def __init__(self, finish: Callable[[], torch.Tensor], started: Event | None = None) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._started = started

    def wait(self) -> torch.Tensor:
        """Return the result; raises when a rank or a link failed."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("wait was called twice for one communication")
        return finish() if self._started is None else wait_recorded(self._started, finish)


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, op: str = "sum", label: str = ""
) -> Pending:
    """Reduce ``tensor`` over the ranks, in place.

    Args:
        tensor: of the same size and dtype on all ranks, with any strides.
        group: the process group.
        op: one of ``OPS``.
        label: of the communication in the log, also for the other functions.

    Raises:
        ValueError: the ranks called different collectives, where they share memory.
    """
    checks.choice("all_reduce", "op", op, OPS)
    ranks = group.size()
    if ranks == 1:
        return Pending(lambda: tensor)
    buffer = _dense(tensor)
    started = record_start("all_reduce", label, 2 * _bytes(tensor) * (ranks - 1) // ranks, group)
    finish = shared_memory.all_reduce(buffer, group, op)
    if finish is None and tensor.numel() > 0 and not tensor.is_meta:
        kind = getattr(dist.ReduceOp, op.upper())
        work = dist.all_reduce(buffer, kind, group, async_op=True)
        finish = partial(_waited, work, buffer)
    return Pending(_copied_back(tensor, buffer, finish), started)


def all_reduce_ordered(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, label: str = ""
) -> Pending:
    """Return the sum over the ranks of ``[N]``, contiguous, added as ``reduce_scatter`` adds.

    The result is another tensor. Sent as a reduce-scatter and an all-gather: the bytes of a ring.
    """
    ranks, size = group.size(), tensor.numel()
    if ranks == 1:
        return Pending(lambda: tensor)
    padded = torch.nn.functional.pad(tensor, (0, -size % ranks))
    scattered = reduce_scatter(padded, group, label=label, ordered=True)
    return Pending(lambda: all_gather(scattered.wait(), group, label=label).wait()[:size])


def all_gather(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    out: torch.Tensor | None = None,
    label: str = "",
) -> Pending:
    """Join the ranks' tensors, all of one shape, along ``dim`` in the order of the ranks.

    ``out``, for ``dim`` 0, receives them; ``tensor`` may be a part of it.
    """
    ranks = group.size()
    if ranks == 1:
        return Pending(lambda: tensor if out is None else out.copy_(tensor))
    dim, rows = dim % tensor.dim(), tensor.shape[0]
    tensor = _dense(tensor)
    started = record_start("all_gather", label, _bytes(tensor) * (ranks - 1), group)
    parts = tensor.new_empty((ranks * rows, *tensor.shape[1:])) if out is None else out
    buffer = _dense(parts)
    gather = shared_memory.exchange("all_gather", tensor, buffer, group)
    if gather is None and tensor.numel() > 0 and not tensor.is_meta:
        work = all_gather_single(buffer, tensor, group=group, async_op=True)
        gather = partial(_waited, work, tensor)
    finish_parts = _copied_back(parts, buffer, gather)

    def finish() -> torch.Tensor:
        finish_parts()
        if dim == 0:
            return parts
        return parts.unflatten(0, (ranks, rows)).movedim(0, dim).flatten(dim, dim + 1)

    return Pending(finish, started)


def sums_in_order(device: torch.device) -> bool:
    """Return whether ``reduce_scatter`` adds in the order of the ranks on a device.

    It does on a CPU, and on a GPU after ``torch.use_deterministic_algorithms(True)``. An ordered
    sum is sent as an all-to-all, of which each network card of a node carries the bytes of all
    GPUs that share it; NCCL's own reduce-scatter sends most of them inside the node.
    """
    return device.type != "cuda" or torch.are_deterministic_algorithms_enabled()


def reduce_scatter(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    label: str = "",
    ordered: bool = False,
) -> Pending:
    """Sum the ranks' tensors and give each rank its part of ``dim``, in the order of the ranks.

    An ordered sum is sent as an all-to-all and added up here, as ``ordered_sum`` does. The bytes
    sent are those of a ring; gloo's own would send those of an all-reduce.

    Args:
        tensor: contiguous or not.
        group: the process group.
        dim: that is divided.
        label: for the log.
        ordered: add as ``ordered_sum``, also where ``sums_in_order`` is false.

    Raises:
        ValueError: the group does not divide the size of ``dim``.
    """
    ranks = group.size()
    if ranks == 1:
        return Pending(lambda: tensor)
    dim = dim % tensor.dim()
    check_divides("reduce_scatter", tensor, dim, ranks)
    parts = _dense(tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0))
    started = record_start("reduce_scatter", label, _bytes(parts) * (ranks - 1) // ranks, group)
    summed = shared_memory.reduce_scatter(parts, group)
    if summed is not None:
        return Pending(summed, started)
    if tensor.numel() == 0:
        return Pending(lambda: parts[0], started)
    if not (ordered or sums_in_order(tensor.device)):
        own = torch.empty_like(parts[0])
        work = reduce_scatter_single(own, parts, group=group, async_op=True)

        def native() -> torch.Tensor:
            _waited(work, parts)
            return own

        return Pending(native, started)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)

    def finish() -> torch.Tensor:
        _waited(work, parts)
        return ordered_sum(received.unbind(0))

    return Pending(finish, started)


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors in the accumulation dtype, rounded once.

    Neighbours are added first, then pairs of them, and so on: a rank that has added 2, 4 or 8
    neighbours beforehand has a part of this sum, and gets the same bits.
    """
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    wide = dtypes.statistics_dtype(dtype)
    sums: list[tuple[int, torch.Tensor]] = []  # number of neighbours in each, decreasing
    for part in parts:
        size = 1
        while sums and sums[-1][0] == size:
            before = sums.pop()[1]
            part = before.to(wide) + part if size == 1 else before.add_(part)
            size *= 2
        sums.append((size, part))
    total = sums[0][1]
    for _, part in sums[1:]:
        total += part
    return total.to(dtype)


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, source: int = 0, label: str = ""
) -> Pending:
    """Overwrite ``tensor`` by that of rank ``source`` of the group."""
    ranks = group.size()
    if ranks == 1:
        return Pending(lambda: tensor)
    if not 0 <= source < ranks:
        checks.fail("broadcast", "source", f"a rank of the group of {ranks}", source)
    sent, name = _bytes(tensor) if group.rank() == source else 0, f"broadcast from rank {source}"
    started = record_start("broadcast", label, sent, group)
    buffer = _dense(tensor)
    finish = shared_memory.exchange("broadcast", buffer, buffer, group, source, name)
    if finish is None and tensor.numel() > 0:
        work = dist.broadcast(buffer, group=group, group_src=source, async_op=True)
        finish = partial(_waited, work, buffer)
    return Pending(_copied_back(tensor, buffer, finish), started)


def all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    label: str = "",
) -> Pending:
    """Send each rank its rows; returns those that arrive, in the order of the ranks.

    Args:
        rows: ``[sum(send), ...]``, those for rank 0 first.
        group: the process group.
        send: rows for each rank; by default the same for all.
        receive: rows from each rank; by default as many as are sent.
        out: ``[sum(receive), ...]`` to receive in.
        label: for the log.

    Raises:
        ValueError: the group does not divide the rows, and ``send`` is not given.
    """
    ranks, equal = group.size(), send is None and receive is None
    if send is None:
        check_divides("all_to_all", rows, 0, ranks)
        send = [rows.shape[0] // ranks] * ranks
    receive = send if receive is None else receive
    if out is None:
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
    result, rows = out, _dense(rows)
    buffer = _dense(result)
    row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
    started = record_start("all_to_all", label, (sum(send) - send[group.rank()]) * row_bytes, group)
    announced = None
    if equal:
        exchanged = shared_memory.exchange("all_to_all", rows, buffer, group)
        if exchanged is not None:
            return Pending(_copied_back(result, buffer, exchanged), started)
    else:
        announced = shared_memory.announce_all_to_all(rows, group)
    work = dist.all_to_all_single(
        buffer, rows, list(receive), list(send), group=group, async_op=True
    )

    def finish() -> torch.Tensor:
        if announced is not None:
            announced()
        return _waited(work, rows)

    return Pending(_copied_back(result, buffer, finish), started)


def send_receive(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    to: int | None,
    source: int | None,
    out: torch.Tensor | None = None,
    label: str = "",
) -> Pending:
    """Send ``tensor`` to one rank of the group and receive one from another.

    Args:
        tensor: what is sent; with ``to=None`` only its shape, dtype and device matter.
        group: the process group.
        to: the rank that receives it, or ``None``: nothing is sent.
        source: the rank whose tensor arrives, or ``None``: the result is ``out``, or ``tensor``.
        out: to receive in; of the shape of ``tensor``.
        label: for the log.
    """
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor) if out is None and source is not None else out
    received = tensor if received is None else received
    if to is None and source is None:
        return Pending(lambda: received)
    started = record_start("send_receive", label, _bytes(tensor) if to is not None else 0, group)
    sends = {} if to is None else {to: tensor}
    receives = {} if source is None else {source: received}
    return Pending(_peer_to_peer(sends, receives, received, group), started)


def exchange(
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, int],
    group: dist.ProcessGroup,
    *,
    longest: int,
    like: torch.Tensor,
    label: str = "",
) -> Pending:
    """Send tensors of different sizes to some ranks of the group and receive from some.

    All ranks of the group call it together, also one that neither sends nor receives. Each knows
    what it sends and receives.

    Args:
        sends: by rank, contiguous tensors.
        receives: by rank, the number of elements that it sends to this one.
        group: the process group.
        longest: the most elements that any rank sends to another, the same number on all ranks;
            where it is 0, nothing is sent.
        like: a tensor of the dtype and on the device of what is received.
        label: for the log, which has no exchange in which this rank does nothing.

    Returns:
        A ``Pending`` of the received elements in one dim, in the order of the ranks.
    """
    received = like.new_empty(sum(receives.values()) if longest else 0)
    if not longest:
        return Pending(lambda: received)
    sends = {rank: tensor for rank, tensor in sends.items() if tensor.numel()}
    receives = {rank: count for rank, count in sorted(receives.items()) if count}
    sent = sum(map(_bytes, sends.values()))
    started = record_start("send_receive", label, sent, group) if sends or receives else None
    if like.is_meta:
        return Pending(lambda: received, started)
    finish = shared_memory.exchange_parts(sends, receives, received, group, longest)
    if finish is not None:
        return Pending(finish, started)
    parts = received.split(list(receives.values())) if receives else ()
    into = dict(zip(receives, parts, strict=True))
    return Pending(_peer_to_peer(sends, into, received, group), started)


def _peer_to_peer(
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, torch.Tensor],
    received: torch.Tensor,
    group: dist.ProcessGroup,
) -> Callable[[], torch.Tensor]:
    """Start to send and to receive tensors, by rank; returns what waits for all of them."""
    batch = [
        dist.P2POp(kind, tensor, group=group, group_peer=rank)
        for kind, tensors in ((dist.isend, sends), (dist.irecv, receives))
        for rank, tensor in tensors.items()
    ]
    works = dist.batch_isend_irecv(batch) if batch else []

    def finish() -> torch.Tensor:
        for work in works:
            _waited(work, received)
        batch.clear()  # its tensors are alive until now
        return received

    return finish


def shift(tensor: torch.Tensor, group: dist.ProcessGroup, *, by: int, label: str = "") -> Pending:
    """Send ``tensor`` to the rank ``by`` ahead in the circle and receive from the one behind.

    All ranks of the group call it together, with tensors of one shape and one ``by``, no multiple
    of the group's size. The result is another tensor.
    """
    ranks, tensor = group.size(), tensor.contiguous()
    to, source = (group.rank() + by) % ranks, (group.rank() - by) % ranks
    received = torch.empty_like(tensor)
    name = f"shift by {by % ranks}"
    finish = shared_memory.exchange("shift", tensor, received, group, source, name)
    if finish is None:
        return send_receive(tensor, group, to=to, source=source, out=received, label=label)
    return Pending(finish, record_start("send_receive", label, _bytes(tensor), group))


def group_of(name: str) -> dist.ProcessGroup:
    """Return the process group of a name: operators take names."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def check_divides(op: str, tensor: torch.Tensor, dim: int, ranks: int) -> None:
    """Raise unless a dim can be cut into one part per rank."""
    size = tensor.shape[dim]
    if size % ranks:
        checks.fail(op, f"size of dim {dim}", f"a multiple of the {ranks} ranks of the group", size)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its memory is that of a contiguous one, else such a copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copied_back(
    tensor: torch.Tensor, buffer: torch.Tensor, finish: Callable[[], Any] | None
) -> Callable[[], torch.Tensor]:
    """Return a function that calls ``finish`` and copies ``buffer`` into ``tensor``."""

    def finished() -> torch.Tensor:
        if finish is not None:
            finish()
        if buffer is not tensor:
            tensor.detach().copy_(buffer)
        return tensor

    return finished


def _waited(work: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Wait; ``tensor``, which the communication reads or writes, is alive until then."""
    if work is not None:  # groups of threads give none: they have finished
        work.wait()
    return tensor
