"""Collectives of processes of one machine through memory that they share, in place of sockets.

gloo sends every byte through a socket, on one machine too. Where all ranks of a group of gloo see
each other's memory, collectives of equal tensors on the CPU go through rings in it
(``csrc/runtime/shared_memory``); everything else stays with the group's own backend. The ranks
agree on it when they first communicate: one that cannot, or has ``FUSEDOPS_SHARED_MEMORY=0``, keeps
all on sockets. Groups of NCCL never use it.

Sums have the bits of ``collectives.ordered_sum``, whatever the size of the tensor. Every piece in
the rings names its collective. Ranks that call different ones all get a ``ValueError`` that names
both calls, and their group communicates no more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fusedops._core import env, extension

MAX_RANKS = 64
_SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Finish = Callable[[], torch.Tensor]


class Channel(NamedTuple):
    """A group's rings, its process group backend, and its name and description."""

    rings: Any
    backend: Any
    group: tuple[str, str]


# None: its ranks stay with the backend.
_channels: WeakKeyDictionary[dist.ProcessGroup, Channel | None] = WeakKeyDictionary()


@dataclass(slots=True)
class CollectiveCall:
    """A collective in shared memory: torch's flight recorder has none of them."""

    group: tuple[str, str]  # name and description
    number: int  # of the collective in its group, from 1
    kind: str
    shape: torch.Size  # of the tensor that this rank gives
    dtype: torch.dtype  # of that tensor
    created_ns: int  # when it was started, as ``time.time_ns``
    state: str = "posted"  # ``"posted"``, ``"waiting"`` for other ranks, ``"completed"``


# The last ones of this process, the oldest first, and how often one was begun or ended.
calls: deque[CollectiveCall] = deque(maxlen=1000)
_changes = [0]


def count() -> int:
    """Return a number that changes when this process begins or ends a collective."""
    return _changes[0]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> Finish | None:
    """Start a reduction over the ranks, in place; ``None`` where the backend must do it.

    Sums of floating-point numbers are added in the rings. For everything else each rank gathers the
    others' tensors and reduces them itself.
    """
    name = f"all_reduce ({op})"
    if op == "sum" and tensor.dtype in _SUMMED:
        return exchange("all_reduce", tensor, tensor, group, name=name)
    if _channel(group, tensor) is None:
        return None
    parts = tensor.new_empty((group.size(), *tensor.shape))
    gathered = exchange("all_gather", tensor, parts, group, name=name)
    assert gathered is not None
    return lambda: tensor.copy_(_reduced(gathered(), op))


def _reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Return the reduction of ``parts`` over their first dim."""
    if op == "max":
        return parts.amax(0)
    if op == "min":
        return parts.amin(0)
    if op == "product":
        return parts.prod(0, dtype=parts.dtype)
    total = parts.sum(0, dtype=parts.dtype)
    return total / len(parts) if op == "avg" else total


def reduce_scatter(parts: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Start the sum of the ranks' ``parts[rank]``; ``None`` where the backend must do it."""
    if parts.dtype in _SUMMED:
        return exchange("reduce_scatter", parts, torch.empty_like(parts[0]), group)
    received = torch.empty_like(parts)
    exchanged = exchange("all_to_all", parts, received, group, name="reduce_scatter")
    if exchanged is None:
        return None
    return lambda: _reduced(exchanged(), "sum")


def announce_all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Announce an all-to-all of unequal parts, by the backend; ``None`` without shared memory.

    The result waits until all ranks have announced the same, and raises if one calls another.
    """
    empty = tensor.new_empty(0)
    text = f"all_to_all of unequal parts of {tensor.dtype}"
    return _start("sync", text, empty, empty, group)


def exchange(
    kind: str,
    sent: torch.Tensor,
    received: torch.Tensor,
    group: dist.ProcessGroup,
    source: int = 0,
    name: str | None = None,
) -> Finish | None:
    """Start a collective from one tensor to another; ``None`` where the backend must do it.

    Args:
        kind: ``"all_gather"``; ``"all_reduce"``; ``"all_to_all"`` of equal parts;
            ``"reduce_scatter"``; ``"shift"``, whose ranks are each the source of one other;
            ``"broadcast"``.
        sent: what this rank gives.
        received: the result; ``sent`` of an all-reduce or a broadcast.
        group: all of its ranks take part, with tensors of one shape.
        source: the rank whose tensor comes, of a shift or a broadcast.
        name: for the messages of ranks that call different collectives.
    """
    text = f"{name or kind} of {sent.numel()} elements of {sent.dtype}"
    return _start(kind, text, sent, received, group, source)


def exchange_parts(
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, int],
    received: torch.Tensor,
    group: dist.ProcessGroup,
    longest: int,
) -> Finish | None:
    """Start an exchange of different lengths; ``None`` where the backend must do it.

    Args:
        sends: by rank, contiguous tensors of one dtype.
        receives: by rank, the number of elements from it.
        received: the result, in one dim, in the order of the ranks.
        group: all of its ranks take part, also those that do nothing.
        longest: the most elements that any rank sends to another.
    """
    if _channel(group, received) is None:
        return None
    ranks = range(group.size())
    parts = [sends[rank].reshape(-1) for rank in sorted(sends)]
    sent = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else received.new_empty(0)
    sizes = [sends[rank].numel() if rank in sends else 0 for rank in ranks]
    counts = sizes, [receives.get(rank, 0) for rank in ranks], longest
    text = f"exchange of at most {longest} elements of {received.dtype}"
    return _start("exchange", text, sent, received, group, parts=counts)


def _start(
    kind: str,
    text: str,
    sent: torch.Tensor,
    received: torch.Tensor,
    group: dist.ProcessGroup,
    source: int = 0,
    parts: tuple[list[int], list[int], int] | None = None,
) -> Finish | None:
    """Start a collective whose description, ``text``, must be the same on all ranks.

    ``parts`` are what an exchange sends and receives by rank, and the most that any rank sends.
    """
    channel = _channel(group, sent)
    if channel is None:
        return None
    tensors = sent.detach(), received.detach()

    def start() -> int:
        if parts is None:
            return channel.rings.start(kind, text, *tensors, source)
        return channel.rings.start_exchange(text, *tensors, *parts)

    number = _checked(channel, start)
    name = text.partition(" ")[0]
    call = CollectiveCall(channel.group, number + 1, name, sent.shape, sent.dtype, time.time_ns())
    calls.append(call)
    _changes[0] += 1

    def finish() -> torch.Tensor:
        call.state = "waiting"
        timeout = channel.backend.options._timeout.total_seconds()  # callers may have changed it
        _checked(channel, lambda: channel.rings.finish(number, timeout))
        call.state = "completed"
        _changes[0] += 1
        return received

    return finish


def _checked(channel: Channel, call: Callable[[], Any]) -> Any:
    """Call into the rings; their errors get the group's name and lose the C++ stack."""
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else dist.DistNetworkError
        message = f"{str(error).splitlines()[0]} (group {shown_group(*channel.group)})"
        raise kind(message) from None


def shown_group(name: str, description: str) -> str:
    """Return how messages name a group: by its description if it has one."""
    return name if description in ("", "undefined") else description


def _channel(group: dist.ProcessGroup, tensor: torch.Tensor) -> Channel | None:
    """Return the channel of these ranks, ``None`` where there is none for such a tensor.

    The conditions are the same on all ranks: neither sizes nor strides.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return None
    # A subclass may compute in place of the CPU: ranks in one process, fake tensors.
    is_simulated = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if tensor.layout is not torch.strided or is_simulated:
        return None
    if group not in _channels:
        _channels[group] = _connect(group)
    return _channels[group]


def _connect(group: dist.ProcessGroup) -> Channel | None:
    """Agree with the other ranks and return the channel, or ``None`` on all of them."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None or not isinstance(backend, gloo) or not 2 <= group.size() <= MAX_RANKS:
        return None
    rings = _agree(group, _new_rings(group))
    if rings is None:
        return None
    return Channel(rings, backend, (group.group_name, group.group_desc))


def _new_rings(group: dist.ProcessGroup) -> Any:
    if env.shared_memory_disabled() or extension.cpu_library() is not None:
        return None
    try:
        kind = torch.classes.fusedops_native.SharedChannel
    except RuntimeError:  # built for another system than Linux
        return None
    return kind(group.rank(), group.size())


def _agree(group: dist.ProcessGroup, rings: Any) -> Any:
    """Exchange process ids and descriptors; all ranks must see the memory of all."""
    descriptor = -1 if rings is None else rings.descriptor()
    secret = secrets.randbits(62)
    if descriptor >= 0:
        rings.write_secret(secret)
    mine = torch.tensor([_machine(), os.getpid(), descriptor, secret])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    machines, processes, descriptors, words = torch.stack(everyone).t().tolist()
    sees = min(descriptors) >= 0 and len(set(machines)) == 1
    sees = sees and rings.connect(processes, descriptors, words)
    all_see = torch.tensor(int(sees))
    dist.all_reduce(all_see, dist.ReduceOp.MIN, group=group)
    return rings if all_see.item() else None


def _machine() -> int:
    """Return a number shared by processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        words = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 2
