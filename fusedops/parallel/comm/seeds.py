"""Seeds that all ranks of a group agree on, however their generators were seeded."""

from __future__ import annotations

import torch
from torch import distributed as dist

from fusedops._core import philox
from fusedops.parallel.comm import collectives


def agreed_seed(device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a new seed, int64 ``[2]``, of the first rank's generator on all ranks of the group.

    Every rank must call this, and every rank's generator advances. Without a group the seed is that
    of this process. The host does not wait for a GPU.
    """
    seed = philox.new_seed(device)
    return seed if group is None else collectives.broadcast(seed, group, label="seed").wait()
