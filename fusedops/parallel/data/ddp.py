"""Data parallelism with replicated parameters: gradients are summed over ranks in buckets.

Each rank has all parameters and sees other tokens. Sums are not divided by the number of ranks: the
caller divides the loss by the number of all tokens. ``fsdp.py`` shards parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from fusedops._core import checks, dtypes
from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.comm import collectives

BUCKET_BYTES = 25 << 20
_OP = "BucketedAllReduce"


def by_bytes(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Return parameters in buckets of about ``limit`` bytes, each of one dtype and device.

    ``parameters`` are in the order of the forward, and the buckets in reverse: the last gradients
    are ready first. A bucket ends with the parameter whose local shard reaches the limit.
    """
    unfinished: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    buckets = []
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = unfinished.setdefault(kind, [])
        bucket.append(parameter)
        if sum(map(local_bytes, bucket)) >= limit:
            buckets.append(unfinished.pop(kind))
    return buckets + list(unfinished.values())


def local_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of this process's shard of a parameter."""
    shard = _local(parameter)
    return shard.numel() * shard.element_size()


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are one all-reduce, and its state in the current backward."""

    number: int
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    pending: collectives.Pending | None = None


class BucketedAllReduce:
    """Sums the gradients of replicated parameters over ranks, in buckets during the backward.

    A bucket is reduced as soon as all of its gradients are ready, in the order of the buckets on
    all ranks; the end of the backward waits for the last one. A parameter without a gradient on one
    rank counts as 0 there, and has none afterwards if it has none on any rank.

    Args:
        buckets: parameters of one dtype and device each, those first whose gradients are ready
            first. Parameters that need no gradient are left out.
        group: the ranks.
        overlap: start during the backward, else after it.
        ordered: add in the order of ``collectives.ordered_sum``, and the gradients of each
            micro-batch before those of the next: a rank that adds those of 2, 4 or 8 neighbours by
            itself then gets the same bits.

    Attributes:
        synchronize: whether the next backward reduces. ``False`` while gradients of several
            micro-batches are accumulated; it must be ``True`` for the last one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a bucket mixes dtypes or devices, or a parameter is in two.

    Note:
        Half-precision gradients are summed in float32 and rounded once. All ranks get the same
        bits. ``torch.autograd.grad`` accumulates nothing, so nothing is reduced.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import BucketedAllReduce
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> reducer = BucketedAllReduce([[layer.weight]], dist.group.WORLD)
        >>> layer(torch.tensor([1.0, 2.0])).sum().backward()  # summed over the ranks
        >>> layer.weight.grad
        tensor([[1., 2.]])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        overlap: bool = True,
        ordered: bool = False,
    ) -> None:
        checks.flag(_OP, "overlap", overlap)
        checks.flag(_OP, "ordered", ordered)
        if not isinstance(group, dist.ProcessGroup):
            got = checks.type_name(group)
            raise TypeError(f"{_OP}: group must be a torch.distributed.ProcessGroup, got {got}")
        self.group = group
        self.overlap = overlap
        self.ordered = ordered
        self.synchronize = True
        self._deferred = False
        self._backward = -1  # autograd's number of the backward whose gradients are reduced
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        trained = [[p for p in bucket if p.requires_grad] for bucket in buckets]
        self._buckets = [_Bucket(i, bucket) for i, bucket in enumerate(filter(None, trained))]
        _check_buckets(self._buckets)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            for parameter in self._bucket_of
            if group.size() > 1
        ]
        # Gradients of earlier backwards are set aside before autograd adds the first one to them.
        self._nodes = [
            get_gradient_edge(p).node for p in self._bucket_of if ordered and self._hooks
        ]
        self._hooks += [node.register_prehook(self._begin_backward) for node in self._nodes]

    def begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch; ``last`` tells whether it is the last one of a step."""
        self.recover()
        self.synchronize = last or self.ordered

    def recover(self) -> None:
        """Discard what a backward that raised has left; without one this does nothing.

        All ranks must have raised: a reduction that started on some ranks alone does not end.
        """
        self._earlier.clear()
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None

    def defer(self) -> None:
        """Let the caller end the reductions of a step by ``start`` and ``finish``.

        The last backward starts those whose gradients it has completed, and waits for none. In a
        backward that comes in two parts hooks are not called, and ``start`` starts all.
        """
        self._deferred, self.synchronize = True, False

    def start(self) -> None:
        """Start to reduce what the last backward did not; ``finish`` waits."""
        self._start(lambda bucket: True)
        self.synchronize = False

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Record a gradient, and start every bucket that is complete."""
        if not self.synchronize:
            return
        self._begin_backward()
        self._bucket_of[parameter].missing.discard(parameter)
        if self.overlap:
            self._start(lambda bucket: not bucket.missing)

    def _begin_backward(self, *_: Any) -> None:
        """Prepare for the gradients of a backward, at the first of them."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self.recover()
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
        for parameter in self._bucket_of if self.ordered else ():
            if parameter.grad is not None:
                self._earlier[parameter], parameter.grad = parameter.grad, None
        if not self._deferred:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _start(self, ready: Callable[[_Bucket], bool]) -> None:
        """Start buckets in order, up to the first that is not ready."""
        for bucket in self._buckets:
            if bucket.pending is None:
                if not ready(bucket):
                    return
                flat = _pack(bucket.parameters)
                label = f"gradients {bucket.number}"
                add = collectives.all_reduce_ordered if self.ordered else collectives.all_reduce
                bucket.pending = add(flat, self.group, label=label)

    def finish(self) -> None:
        """Start what is left, wait for all reductions, and write the sums."""
        try:
            self._start(lambda bucket: True)
            for bucket in self._buckets:
                assert bucket.pending is not None
                _unpack(bucket.pending.wait(), bucket.parameters)
            self._add_earlier()
        finally:
            for bucket in self._buckets:
                bucket.pending = None

    @torch.no_grad()
    def _add_earlier(self) -> None:
        """Add the sums of earlier micro-batches, in whose order autograd would have added."""
        while self._earlier:
            parameter, earlier = self._earlier.popitem()
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _check_buckets(buckets: list[_Bucket]) -> None:
    seen: set[nn.Parameter] = set()
    for bucket in buckets:
        kinds = {(parameter.dtype, parameter.device) for parameter in bucket.parameters}
        if len(kinds) > 1:
            names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            checks.fail(_OP, "buckets", "of one dtype and device each", names)
        if seen & set(bucket.parameters):
            checks.fail(_OP, "buckets", "apart", "a parameter that is in two")
        seen |= set(bucket.parameters)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _pack(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return all gradients in one tensor, followed by a 1 for each that exists."""
    dtype = dtypes.statistics_dtype(parameters[0].dtype)
    parts = []
    for parameter in parameters:
        grad = parameter.grad
        part = _local(parameter if grad is None else grad).reshape(-1).to(dtype)
        parts.append(torch.zeros_like(part) if grad is None else part)
    exists = [float(parameter.grad is not None) for parameter in parameters]
    return torch.cat([*parts, device_tensor(exists, dtype, parts[0].device)])


@torch.no_grad()
def _unpack(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Write the sums into the gradients; create those that only other ranks have."""
    sizes = [_local(parameter).numel() for parameter in parameters]
    *parts, exists = flat.split([*sizes, len(parameters)])
    if any(parameter.grad is None for parameter in parameters):
        for parameter, count in zip(parameters, exists.tolist(), strict=True):
            if parameter.grad is None and count:
                parameter.grad = torch.zeros_like(parameter)
    pairs = [
        (_local(parameter.grad), part.view(_local(parameter).shape))
        for parameter, part in zip(parameters, parts, strict=True)
        if parameter.grad is not None
    ]
    if pairs:
        torch._foreach_copy_([grad for grad, _ in pairs], [part for _, part in pairs])
