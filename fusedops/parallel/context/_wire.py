"""One message between two ranks each way, started early and awaited late."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Pending:
    """A message under way."""

    def __init__(self, works: list[dist.Work], sent: torch.Tensor, out: torch.Tensor) -> None:
        self._works, self._sent, self._out = works, sent, out

    def wait(self) -> torch.Tensor:
        """Return what came; raises when a rank or a link failed."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], self._out
        return self._out


def send_receive(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    to: int | None,
    source: int | None,
    out: torch.Tensor,
) -> Pending:
    """Begin to send ``tensor`` to one rank of the group, and to receive ``out`` from another."""
    batch = []
    if to is not None:
        batch.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=to))
    if source is not None:
        batch.append(dist.P2POp(dist.irecv, out, group=group, group_peer=source))
    return Pending(dist.batch_isend_irecv(batch) if batch else [], tensor, out)
