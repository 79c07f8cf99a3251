"""Groups over which hosts communicate, whatever device their ranks compute on.

A message must be read on the host before it can be raised. Over NCCL that waits for all work of
the device; over gloo it is a message between processes, while devices compute. A group that takes
tensors on the CPU serves itself. Any other gets a *companion*, made once, by all of its ranks
together: connections of gloo that meet in the group's own store. If one rank cannot connect, none
uses its companion.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fusedops._core.device_tensors import device_tensor

_LOG = logging.getLogger("fusedops")
# All ranks connect at the same time: one that does not answer by then cannot be reached.
_TIME_TO_CONNECT = timedelta(seconds=60)

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of the same ranks over which hosts communicate, ``None`` if they cannot.

    Args:
        group: all of its ranks make the first call together.
        device: one that the group can send from. The first call waits for it.
    """
    if _takes_cpu(group):
        return group
    if group not in _companions:
        companion = _companion(group, device)
        works = device_tensor(companion is not None, torch.int32, device)
        dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
        _companions[group] = companion if works.item() else None
    return _companions[group]


def register(group: dist.ProcessGroup, companion: dist.ProcessGroup) -> None:
    """Let hosts of a group communicate over another group of the same ranks; all ranks call it."""
    _companions[group] = companion


def _takes_cpu(group: dist.ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _companion(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of the same ranks for tensors on the CPU, with the same timeout."""
    rank, size = group.rank(), group.size()
    try:
        store = dist.PrefixStore("fusedops/hosts", group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, rank, size, _TIME_TO_CONNECT)
    except (AttributeError, RuntimeError) as error:  # built without gloo, or unreachable
        _LOG.warning("hosts cannot connect over gloo: %s", error)
        return None
    gloo._set_default_timeout(group._get_backend(device).options._timeout)
    companion = dist.ProcessGroup(store, rank, size)
    companion._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return companion
