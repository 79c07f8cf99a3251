"""Groups over which hosts communicate, whatever device their ranks compute on.

A message must be read on the host before it can be raised. Over NCCL that waits for all work of
the device; over gloo it is a message between processes, while devices compute. A group that takes
tensors on the CPU serves itself. Any other gets a *companion*, made once, by all of its ranks
together: connections of gloo that meet in the group's own store. If one rank cannot connect, none
uses its companions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fusedops._core.device_tensors import device_tensor

_LOG = logging.getLogger("fusedops")
# All ranks connect at the same time: one that does not answer by then cannot be reached.
_TIME_TO_CONNECT = timedelta(seconds=60)

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()
# By the first and the last of the groups: what their ranks agreed on.
_connected: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[dist.ProcessGroup, bool]]
_connected = WeakKeyDictionary()


def connect(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Connect the hosts of these ranks. All of them call this together, with any device.

    Args:
        groups: one, or those within and across nodes.
        device: one that the groups can send from. The first call waits for it.
    """
    if all(map(_takes_cpu, groups)) or _agreed(groups) is not None:
        return
    for group in groups:
        if group not in _companions and not _takes_cpu(group):
            _companions[group] = _companion(group, device)
    works = device_tensor(None not in map(_serving, groups), torch.int32, device)
    for group in groups:
        dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    by_last = _connected.setdefault(groups[0], WeakKeyDictionary())
    by_last[groups[-1]] = bool(works.item())


def hosts_of(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup] | None:
    """Return groups of the same ranks over which hosts communicate, ``None`` if they cannot."""
    serving = [group for group in map(_serving, groups) if group is not None]
    if serving == list(groups) or _agreed(groups):
        return serving
    return None


def _agreed(groups: Sequence[dist.ProcessGroup]) -> bool | None:
    """Return whether all ranks are connected, ``None`` where nobody has tried."""
    by_last = _connected.get(groups[0])
    return None if by_last is None else by_last.get(groups[-1])


def _serving(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if _takes_cpu(group) else _companions.get(group)


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
        _LOG.warning("expert parallelism: hosts cannot connect over gloo: %s", error)
        return None
    gloo._set_default_timeout(group._get_backend(device).options._timeout)
    companion = dist.ProcessGroup(store, rank, size)
    companion._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return companion
