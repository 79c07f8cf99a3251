"""Data parallelism with replicated parameters: gradients are summed over ranks in buckets.

Each rank has all parameters and sees other tokens. Sums are not divided by the number of ranks: the
caller divides the loss by the number of all tokens. ``fsdp.py`` shards parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Return parameters in buckets of about ``limit`` bytes, each of one dtype and device.

    ``parameters`` are in the order of the forward, and the buckets in reverse: the last gradients
    are ready first. A bucket ends with the parameter whose local shard reaches the limit. Bytes are
    those that are reduced, of float32 for half precision.
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
    shard = _local(parameter)
    return shard.numel() * shard.element_size()


def _reduced_dtype(parameter: nn.Parameter) -> torch.dtype:
    return dtypes.statistics_dtype(parameter.grad_dtype or parameter.dtype)


class _Bucket:
    """Parameters whose gradients are one all-reduce, and its state in the current backward.

    ``buffer`` has their gradients one after another, of which ``views`` are the parts, then a 1 for
    each that exists on this rank. With ``in_place`` these parts are the gradients of the parameters
    from the first micro-batch on.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], *, in_place: bool) -> None:
        self.number = number
        self.parameters = parameters
        self.missing: set[nn.Parameter] = set()
        self.pending: collectives.Pending | None = None
        shards = [_local(parameter) for parameter in parameters]
        self._sizes = [*(shard.numel() for shard in shards), len(shards)]
        dtype = _reduced_dtype(parameters[0])
        self.in_place = in_place and dtype == parameters[0].grad_dtype
        self.buffer = torch.zeros(sum(self._sizes), dtype=dtype, device=shards[0].device)
        views, _ = self._split(self.buffer)
        self._views = dict(zip(parameters, views, strict=True))

    def _split(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the gradients in a buffer, in the shapes of the parameters, and the marks."""
        *parts, exists = buffer.split(self._sizes)
        shapes = [_local(parameter).shape for parameter in self.parameters]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], exists

    @torch.no_grad()
    def move(self, parameter: nn.Parameter) -> None:
        """Copy a gradient into the buffer; ``in_place`` its part there is the gradient then."""
        grad: Any = parameter.grad
        shard, view = _local(grad), self._views[parameter]
        if _is_in(grad, view):
            return
        view.copy_(shard)
        if self.in_place and shard.is_contiguous():
            is_plain = shard is grad
            parameter.grad = view if is_plain else DTensor(view, grad._spec, requires_grad=False)

    @torch.no_grad()
    def pack(self) -> torch.Tensor:
        """Return the buffer with all gradients, and with zeros for those that do not exist."""
        for parameter, view in self._views.items():
            if parameter.grad is None:
                view.zero_()
            else:
                self.move(parameter)
        exists = [float(parameter.grad is not None) for parameter in self.parameters]
        self.buffer[-len(exists) :] = device_tensor(exists, self.buffer.dtype, self.buffer.device)
        return self.buffer

    @torch.no_grad()
    def unpack(self, buffer: torch.Tensor) -> None:
        """Write sums into the gradients; create those that only other ranks have."""
        # Collectives write without autograd's knowledge: who compares versions must see it.
        torch.autograd.graph.increment_version(buffer)
        sums, exists = self._split(buffer)
        if any(parameter.grad is None for parameter in self.parameters):
            for parameter, count in zip(self.parameters, exists.tolist(), strict=True):
                if parameter.grad is None and count:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        pairs = [
            (_local(parameter.grad), part)
            for parameter, part in zip(self.parameters, sums, strict=True)
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
        rounded once. Parameters whose ``grad_dtype`` is ``torch.float32`` have float32 gradients:
        they are accumulated in float32 too, and never rounded. All ranks get the same bits.
        ``torch.autograd.grad`` accumulates nothing, so nothing is reduced.

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
        _check_buckets(trained)
        # Ordered sums are added to those of earlier micro-batches, which need their own memory.
        self._buckets = [
            _Bucket(number, parameters, in_place=not ordered)
            for number, parameters in enumerate(filter(None, trained))
            if group.size() > 1  # else the gradients are the sums
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
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
        bucket = self._bucket_of[parameter]
        if bucket.in_place:
            bucket.move(parameter)
        if not self.synchronize:
            return
        self._begin_backward()
        bucket.missing.discard(parameter)
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
                label = f"gradients {bucket.number}"
                add = collectives.all_reduce_ordered if self.ordered else collectives.all_reduce
                bucket.pending = add(bucket.pack(), self.group, label=label)

    def finish(self) -> None:
        """Start what is left, wait for all reductions, and write the sums."""
        try:
            self._start(lambda bucket: True)
            for bucket in self._buckets:
                assert bucket.pending is not None
                bucket.unpack(bucket.pending.wait())
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


def _check_buckets(buckets: list[list[nn.Parameter]]) -> None:
    seen: set[nn.Parameter] = set()
    for bucket in buckets:
        kinds = {(parameter.dtype, parameter.device) for parameter in bucket}
        if len(kinds) > 1:
            names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            checks.fail(_OP, "buckets", "of one dtype and device each", names)
        if seen & set(bucket):
            checks.fail(_OP, "buckets", "apart", "a parameter that is in two")
        seen |= set(bucket)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_in(grad: Any, view: torch.Tensor) -> bool:
    """Whether a gradient is this part of a buffer."""
    return _local(grad).data_ptr() == view.data_ptr()
