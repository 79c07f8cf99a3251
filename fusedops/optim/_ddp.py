"""Gradients of DistributedDataParallel as its buckets are reduced, before it writes them.

DDP fills ``grad`` at the end of the backward. Its communication hook sees each bucket when its turn
has come, and what the hook's future holds is what will be written.
"""

# No `from __future__ import annotations`: DDP compares those of a hook with the types themselves.
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, dist.GradBucket], Future]
Reduced = list[tuple[torch.Tensor, torch.Tensor]]  # parameters, and what will be their gradients


def mean(group: Any, bucket: dist.GradBucket) -> Future:
    """Reduce a bucket to the mean of all ranks, with the bits of DDP without a hook."""
    flat = bucket.buffer().mul_(1.0 / group.size())
    work = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(_flat)


def follow(
    model: DistributedDataParallel,
    hook: Hook,
    state: Any,
    arrived: Callable[[Reduced], None],
    ended: Callable[[], None],
) -> None:
    """Register a hook that tells what was reduced, and that DDP has written all of it.

    ``hook(state, bucket)`` reduces; ``arrived`` is called with each reduced bucket, on any thread,
    and ``ended`` at the end of the backward, on the thread that runs it.
    """

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        params, places = bucket.parameters(), _places(bucket)
        if bucket.is_last():
            # DDP's own callback, which writes, is queued after this one, and before the next.
            _after_backward(lambda: _after_backward(ended))
        future = hook(state, bucket)

        def note(done: Future) -> torch.Tensor:
            flat = _flat(done)
            if flat.layout is torch.strided:
                pairs = zip(params, places, strict=True)
                arrived([(param, _part(flat, param, place)) for param, place in pairs])
            return flat

        return future.then(note)

    model.register_comm_hook(state, reduce)


def _places(bucket: dist.GradBucket) -> list[int]:
    flat = bucket.buffer()
    if flat.layout is not torch.strided:
        return [0] * len(bucket.parameters())
    start = int(flat.storage_offset())
    return [int(gradient.storage_offset()) - start for gradient in bucket.gradients()]


def _part(flat: torch.Tensor, param: torch.Tensor, place: int) -> torch.Tensor:
    """Return the gradient of a parameter; it lies in the bucket as DDP lays it out."""
    strides = torch.empty_like(param, device="meta").stride()
    return flat.as_strided(param.shape, strides, flat.storage_offset() + place)


def _flat(done: Any) -> torch.Tensor:
    value = done.value()
    return value[0] if isinstance(value, (list, tuple)) else value


def _after_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)
