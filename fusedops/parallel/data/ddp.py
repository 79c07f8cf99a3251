"""Data parallelism with replicated parameters: gradients are summed over ranks in buckets.

Sums are not divided by the number of ranks: the caller divides the loss by the number of all
tokens. ``fsdp.py`` shards parameters instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from fusedops._core import checks, dtypes
from fusedops._core.device_tensors import device_tensor
from fusedops.parallel.comm import collectives

_OP = "BucketedAllReduce"


def by_bytes(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Return parameters in buckets of about ``limit`` reduced bytes, each of one dtype and device.

    ``parameters`` are in the order of the forward, and the buckets in reverse: the last gradients
    are ready first. A bucket ends with the parameter whose local shard reaches the limit.
    """
    unfinished: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    buckets = []
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = unfinished.setdefault(kind, [])
        bucket.append(parameter)
        if sum(_local(p).numel() * _reduced_dtype(p).itemsize for p in bucket) >= limit:
            buckets.append(unfinished.pop(kind))
    return buckets + list(unfinished.values())


def local_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of this process's shard of a parameter."""
    return _local(parameter).nbytes


def _reduced_dtype(parameter: nn.Parameter) -> torch.dtype:
    return dtypes.statistics_dtype(parameter.grad_dtype or parameter.dtype)


class _Bucket:
    """Parameters whose gradients are one all-reduce, and its state in the current backward.

    ``buffer`` has their gradients one after another, then a 1 for each that exists on this rank.
    With ``in_place`` its parts are the gradients of the parameters from the first micro-batch on.
    """

    def __init__(self, parameters: list[nn.Parameter], *, in_place: bool) -> None:
        self.missing: set[nn.Parameter] = set()
        self.pending: collectives.Pending | None = None
        self._shapes = [_local(parameter).shape for parameter in parameters]
        dtype = _reduced_dtype(parameters[0])
        self.in_place = in_place and dtype == parameters[0].grad_dtype
        size = sum(shape.numel() for shape in self._shapes) + len(parameters)
        self.buffer = torch.zeros(size, dtype=dtype, device=parameters[0].device)
        self.views = dict(zip(parameters, self._split(self.buffer)[0], strict=True))

    def _split(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the gradients in a buffer, in the shapes of the parameters, and the marks."""
        sizes = [shape.numel() for shape in self._shapes]
        *parts, exists = buffer.split([*sizes, len(sizes)])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)], exists

    @torch.no_grad()
    def move(self, parameter: nn.Parameter) -> None:
        """Copy a gradient into the buffer; ``in_place`` its part there is the gradient then."""
        grad: Any = parameter.grad
        shard, view = _local(grad), self.views[parameter]
        if _is_in(grad, view):
            return
        view.copy_(shard)
        if self.in_place and shard.is_contiguous():
            is_plain = shard is grad
            parameter.grad = view if is_plain else DTensor(view, grad._spec, requires_grad=False)

    @torch.no_grad()
    def pack(self) -> torch.Tensor:
        """Return the buffer with all gradients, and with zeros for those that do not exist."""
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
            else:
                self.move(parameter)
        exists = [float(parameter.grad is not None) for parameter in self.views]
        self.buffer[-len(exists) :] = device_tensor(exists, self.buffer.dtype, self.buffer.device)
        return self.buffer

    def unpack(self, buffer: torch.Tensor) -> None:
        """Write sums into the gradients; create those that only other ranks have."""
        # Collectives write without autograd's knowledge: who compares versions must see it.
        torch.autograd.graph.increment_version(buffer)
        sums, exists = self._split(buffer)
        if any(parameter.grad is None for parameter in self.views):
            for parameter, count in zip(self.views, exists.tolist(), strict=True):
                if parameter.grad is None and count:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        pairs = [
            (_local(parameter.grad), part)
            for parameter, part in zip(self.views, sums, strict=True)
            if parameter.grad is not None and not _is_in(parameter.grad, part)
        ]
        if pairs:
            torch._foreach_copy_([grad for grad, _ in pairs], [part for _, part in pairs])


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
        Gradients of several micro-batches are accumulated in the buffers that are reduced, which
        exist as long as this object. Half-precision gradients are summed over ranks in float32 and
        rounded once; with a ``grad_dtype`` of ``torch.float32`` they are accumulated in float32 and
        never rounded. All ranks get the same bits. ``torch.autograd.grad`` reduces nothing.

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
            checks.fail_type(_OP, "group", "a torch.distributed.ProcessGroup", group)
        self.group, self.overlap, self.ordered = group, overlap, ordered
        self.synchronize, self._deferred = True, False
        self._backward = -1  # autograd's number of the backward whose gradients are reduced
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        trained = [[p for p in bucket if p.requires_grad] for bucket in buckets]
        _check_buckets(trained)
        # Ordered sums are added to those of earlier micro-batches, which need their own memory.
        # On one rank the gradients are the sums.
        trained = [parameters for parameters in trained if parameters and group.size() > 1]
        self._buckets = [_Bucket(parameters, in_place=not ordered) for parameters in trained]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
            for parameter in self._bucket_of
        ]
        # Gradients of earlier backwards are set aside before autograd adds the first one to them.
        self._nodes = [get_gradient_edge(p).node for p in self._bucket_of if ordered]
        self._hooks += [node.register_prehook(self._begin_backward) for node in self._nodes]

    def begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch; ``last`` tells whether it is the last one of a step."""
        self.recover()
        self.synchronize = last or self.ordered

    def recover(self) -> None:
        """Discard what a backward that raised, on all ranks, has left; without one do nothing."""
        self._earlier.clear()
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None

    def defer(self) -> None:
        """Let the caller end the reductions of a step by ``start`` and ``finish``.

        The last backward starts what it completes; if it comes in two parts, it starts nothing.
        """
        self._deferred, self.synchronize = True, False

    def start(self) -> None:
        """Start to reduce what the last backward did not; ``finish`` waits."""
        self._start()
        self.synchronize = False

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Record a gradient, and start every bucket that is complete."""
        bucket = self._bucket_of[parameter]
        if bucket.in_place:
            bucket.move(parameter)
        if not self.synchronize:
            return
        self._begin_backward()
        bucket.missing.discard(parameter)
        if self.overlap:
            self._start(complete=True)

    def _begin_backward(self, *_: Any) -> None:
        """Prepare for the gradients of a backward, at the first of them."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self.recover()
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)
        for parameter in self._bucket_of if self.ordered else ():
            if parameter.grad is not None:
                self._earlier[parameter], parameter.grad = parameter.grad, None
        if not self._deferred:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _start(self, *, complete: bool = False) -> None:
        """Start buckets in order; with ``complete`` up to the first that misses gradients."""
        for number, bucket in enumerate(self._buckets):
            if bucket.pending is None:
                if complete and bucket.missing:
                    return
                label = f"gradients {number}"
                add = collectives.all_reduce_ordered if self.ordered else collectives.all_reduce
                bucket.pending = add(bucket.pack(), self.group, label=label)

    @torch.no_grad()
    def finish(self) -> None:
        """Start what is left, wait for all reductions, and write the sums."""
        self._start()
        for bucket in self._buckets:
            pending, bucket.pending = bucket.pending, None
            assert pending is not None
            bucket.unpack(pending.wait())
        # Sums of earlier micro-batches, in whose order autograd would have added.
        while self._earlier:
            parameter, earlier = self._earlier.popitem()
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _check_buckets(buckets: list[list[nn.Parameter]]) -> None:
    seen: set[nn.Parameter] = set()
    for bucket in buckets:
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in bucket}
        if len(kinds) > 1:
            checks.fail(_OP, "buckets", "of one dtype and device each", ", ".join(sorted(kinds)))
        if seen & set(bucket):
            checks.fail(_OP, "buckets", "apart", "a parameter that is in two")
        seen |= set(bucket)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_in(grad: Any, view: torch.Tensor) -> bool:
    """Whether a gradient is this part of a buffer."""
    return _local(grad).data_ptr() == view.data_ptr()
