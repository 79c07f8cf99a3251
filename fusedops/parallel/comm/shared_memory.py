"""Collectives of processes of one machine through memory that they share, in place of sockets.

gloo sends every byte through a socket, on one machine too. Where all ranks of a group of gloo see
each other's memory, collectives of equal tensors on the CPU go through rings in it
(``csrc/cpu/shared_memory/channel.cpp``); everything else stays with the group's own backend. The
ranks agree on it when they first communicate: one that cannot, or has ``FUSEDOPS_SHARED_MEMORY=0``,
keeps all on sockets. Groups of NCCL are left alone.

Sums are those of ``communication.ordered_sum``, to the bit, whatever the size of the tensor. Every
piece in the rings says which collective it belongs to. Ranks that call different ones all get a
``ValueError`` that names both calls, and their group communicates no more.
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
class CollectiveCall:
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
    channel = _channel(group, tensor)
    if channel is None:
        return None
    text = _text(f"all_reduce ({op})", tensor)
    if op == "sum" and tensor.dtype in _SUMMED:
        return _started(channel, "all_reduce", tensor, tensor, lambda: tensor, text=text)
    parts = tensor.new_empty((group.size(), *tensor.shape))
    gathered = _started(channel, "all_gather", tensor, parts, lambda: parts, text=text)
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


def all_gather(
    parts: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup
) -> Finish | None:
    """Start to join the ranks' tensors in ``parts``; ``None`` where the backend must do it."""
    return _exchange("all_gather", tensor, parts, group)


def reduce_scatter(parts: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Start the sum of the ranks' ``parts[rank]``; ``None`` where the backend must do it."""
    if parts.dtype in _SUMMED:
        return _exchange("reduce_scatter", parts, torch.empty_like(parts[0]), group)
    received = torch.empty_like(parts)
    exchanged = _exchange("all_to_all", parts, received, group, name="reduce_scatter")
    if exchanged is None:
        return None
    return lambda: _reduced(exchanged(), "sum")


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
    behind = (group.rank() - source) % group.size()
    return _exchange("shift", tensor, received, group, source, name=f"shift by {behind}")


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Finish | None:
    """Start to copy what rank ``source`` has; ``None`` where the backend must do it."""
    name = f"broadcast from rank {source}"
    return _exchange("broadcast", tensor, tensor, group, source, name=name)


def announce(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Finish | None:
    """Say that this rank calls a collective which the backend does.

    The result waits until all ranks have said the same, and raises if one calls another collective.
    ``None`` where the ranks share no memory.
    """
    channel = _channel(group, tensor)
    if channel is None:
        return None
    empty = tensor.new_empty(0)
    return _started(channel, "sync", empty, empty, lambda: empty, text=f"{name} of {tensor.dtype}")


def _exchange(
    kind: str,
    given: torch.Tensor,
    taken: torch.Tensor,
    group: dist.ProcessGroup,
    source: int = 0,
    name: str | None = None,
) -> Finish | None:
    channel = _channel(group, given)
    if channel is None:
        return None
    text = _text(name or kind, given)
    return _started(channel, kind, given, taken, lambda: taken, source, text=text)


def _text(name: str, tensor: torch.Tensor) -> str:
    """Return what a rank calls, in words: other ranks must say the same."""
    return f"{name} of {tensor.numel()} elements of {tensor.dtype}"


def _started(
    channel: Channel,
    kind: str,
    given: torch.Tensor,
    taken: torch.Tensor,
    result: Finish,
    source: int = 0,
    *,
    text: str,
) -> Finish:
    tensors = given.detach(), taken.detach()
    number = _checked(channel, lambda: channel.rings.start(kind, text, *tensors, source))
    name = text.partition(" ")[0]
    call = CollectiveCall(channel.group, number + 1, name, given.shape, given.dtype, time.time_ns())
    calls.append(call)
    _changes[0] += 1

    def finish() -> torch.Tensor:
        call.state = "waiting"
        timeout = channel.backend.options._timeout.total_seconds()  # it may be set anew
        _checked(channel, lambda: channel.rings.finish(number, timeout))
        call.state = "completed"
        _changes[0] += 1
        return result()

    return finish


def _checked(channel: Channel, call: Callable[[], Any]) -> Any:
    """Call into the rings; their errors get the group's name and lose the C++ stack."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(_message(channel, error)) from None
    except RuntimeError as error:
        raise dist.DistNetworkError(_message(channel, error)) from None


def _message(channel: Channel, error: Exception) -> str:
    name, description = channel.group
    group = name if description in ("", "undefined") else description
    return f"{str(error).splitlines()[0]} (group {group})"


def _channel(group: dist.ProcessGroup, tensor: torch.Tensor) -> Channel | None:
    """Return the channel of these ranks, ``None`` where there is none for such a tensor.

    What is asked here is the same on all ranks: neither sizes nor strides.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided or _is_simulated(tensor):
        return None
    found: Any = _channels.get(group, _UNKNOWN)
    if found is _UNKNOWN:
        found = _channels[group] = _connect(group)
    return found


def _is_simulated(tensor: torch.Tensor) -> bool:
    """Whether a subclass computes in place of the CPU: ranks in one process, fake tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


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
