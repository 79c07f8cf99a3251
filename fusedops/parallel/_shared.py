"""Collectives of processes of one machine through memory that they share, in place of sockets.

gloo sends every byte through a socket, on one machine too. Where all ranks of a group of gloo see
each other's memory, sums, gathers and exchanges of tensors on the CPU go through rings in it
(``csrc/cpu/shared_channel.cpp``); everything else stays with the group's own backend. The ranks
agree on it when they first communicate: one that cannot, or has ``FUSEDOPS_SHARED_MEMORY=0``,
keeps all on sockets. Groups of NCCL are left alone.

Sums are those of ``communication.ordered_sum``, to the bit, whatever the size of the tensor.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fusedops._core import env, extension

MAX_RANKS = 64
# Up to here each rank reads all others whole; beyond, each sums a part, and the parts are gathered.
_DIRECT_RANKS = 4
_SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNKNOWN = object()

Finish = Callable[[], torch.Tensor]


class Channel(NamedTuple):
    """Of a group: its rings, the backend beside them, its name and description."""

    rings: Any
    backend: Any
    group: tuple[str, str]


# None: its ranks stay with the backend.
_channels: WeakKeyDictionary[dist.ProcessGroup, Channel | None] = WeakKeyDictionary()


@dataclass(slots=True)
class Call:
    """A collective, for whoever asks where this process stands: torch's recorder has none of them.

    Attributes:
        group: name and description of the group.
        number: of the collective in its group, from 1.
        kind: its name.
        shape: of the tensor that this rank gives.
        dtype: of that tensor.
        created_ns: when it was started, as ``time.time_ns``.
        state: ``"posted"``, ``"waiting"`` for other ranks, ``"completed"``.
    """

    group: tuple[str, str]
    number: int
    kind: str
    shape: torch.Size
    dtype: torch.dtype
    created_ns: int
    state: str = "posted"


# The last ones of this process, the oldest first, and how often one was begun or ended.
calls: deque[Call] = deque(maxlen=1000)
_changes = [0]


def count() -> int:
    """Return a number that changes when this process begins or ends a collective."""
    return _changes[0]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Start a sum over the ranks, in place; ``None`` where the backend must do it."""
    channel = _channel(group, tensor) if tensor.dtype in _SUMMED else None
    if channel is None or not tensor.is_contiguous():
        return None
    ranks, flat = group.size(), tensor.view(-1)
    if ranks <= _DIRECT_RANKS or flat.numel() < ranks:
        return _started(channel, "all_reduce", flat, flat, lambda: tensor)
    missing = -flat.numel() % ranks
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    part = padded.new_empty(padded.numel() // ranks)
    summed = _started(channel, "reduce_scatter", padded, part, lambda: part)

    def finish() -> torch.Tensor:
        _started(channel, "all_gather", summed(), padded, lambda: padded)()
        if missing:
            flat.copy_(padded[: flat.numel()])
        return tensor

    return finish


def all_gather(
    parts: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup
) -> Finish | None:
    """Start to join the ranks' tensors in ``parts``; ``None`` where the backend must do it."""
    return _exchange("all_gather", tensor, parts, group)


def reduce_scatter(parts: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Start the sum of the ranks' ``parts[rank]``; ``None`` where the backend must do it."""
    if parts.dtype not in _SUMMED:
        return None
    return _exchange("reduce_scatter", parts, torch.empty_like(parts[0]), group)


def all_to_all(
    received: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup
) -> Finish | None:
    """Start the exchange of equal parts; ``None`` where the backend must do it."""
    return _exchange("all_to_all", parts, received, group)


def shift(
    received: torch.Tensor, tensor: torch.Tensor, source: int, group: dist.ProcessGroup
) -> Finish | None:
    """Start to copy what rank ``source`` gives; ``None`` where the backend must do it.

    All ranks take part, with tensors of one shape, and each is the source of one.
    """
    return _exchange("shift", tensor, received, group, source)


def _exchange(
    kind: str, given: torch.Tensor, taken: torch.Tensor, group: dist.ProcessGroup, source: int = 0
) -> Finish | None:
    channel = _channel(group, given)
    if channel is None or not (given.is_contiguous() and taken.is_contiguous()):
        return None
    return _started(channel, kind, given, taken, lambda: taken, source)


def _started(
    channel: Channel,
    kind: str,
    given: torch.Tensor,
    taken: torch.Tensor,
    result: Finish,
    source: int = 0,
) -> Finish:
    number = channel.rings.start(kind, given.detach(), taken.detach(), source)
    call = Call(channel.group, number + 1, kind, given.shape, given.dtype, time.time_ns())
    calls.append(call)
    _changes[0] += 1

    def finish() -> torch.Tensor:
        call.state = "waiting"
        timeout = channel.backend.options._timeout.total_seconds()  # it may be set anew
        try:
            channel.rings.finish(number, timeout)
        except RuntimeError as error:
            raise dist.DistNetworkError(str(error).splitlines()[0]) from None
        call.state = "completed"
        _changes[0] += 1
        return result()

    return finish


def _channel(group: dist.ProcessGroup, tensor: torch.Tensor) -> Channel | None:
    """Return the channel of these ranks, ``None`` where there is none for such a tensor.

    What is asked here is the same on all ranks.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # ranks in one process, fakes
        return None
    found: Any = _channels.get(group, _UNKNOWN)
    if found is _UNKNOWN:
        found = _channels[group] = _connect(group)
    return found


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
    """Exchange who and where the ranks are; all must see the memory of all."""
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
    """Return a number that processes share which see each other's numbers of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        words = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 2
