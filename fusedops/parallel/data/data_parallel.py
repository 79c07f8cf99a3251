"""Data parallelism: each rank sees other tokens, and gradients are summed over the ranks.

``Replicas`` keeps every parameter whole on each rank and sums gradients in buckets while the
backward still runs. ``shard`` divides parameters over the ranks by torch's FSDP2: by *stage*, 1 the
optimizer's states, 2 gradients as well, 3 weights as well. Sums are sums, and no means: whoever
makes the loss divides it by the number of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fusedops._core import checks, dtypes
from fusedops.parallel.comm import collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

BUCKET_BYTES = 25 << 20


def by_bytes(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Return parameters in buckets of about so many bytes, all of a dtype and device.

    Args:
        parameters: in the order of the forward.
        limit: bytes of this process's parts; a bucket ends with the parameter that reaches it.

    Returns:
        The buckets, the last parameters first: their gradients come first.
    """
    open_: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    buckets = []
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        bucket = open_.setdefault(kind, [])
        bucket.append(parameter)
        if sum(local_bytes(each) for each in bucket) >= limit:
            buckets.append(open_.pop(kind))
    return buckets + list(open_.values())


def local_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of this process's part of a parameter."""
    part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return part.numel() * part.element_size()


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together, and how far they are."""

    number: int
    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    pending: collectives.Pending | None = None


class Replicas:
    """Parameters that each rank has a copy of: their gradients are summed after the backward.

    A bucket is summed as soon as all of its gradients are there, in the order of the buckets on all
    ranks; the end of the backward waits for the last one. A parameter that has no gradient on one
    rank counts as 0 there, and has none afterwards if it has none on any.

    Args:
        buckets: parameters that travel together, those first whose gradients come first; of one
            dtype and device each. Those that need no gradient are left out.
        group: the ranks.
        overlap: begin during the backward, else after it.
        ordered: add as ``communication.ordered_sum`` does, and the gradients of each micro-batch
            before those of the next: who adds those of 2, 4 or 8 neighbours by itself then has the
            same bits.

    Attributes:
        synchronize: whether the next backward sums. ``False`` while gradients of several
            micro-batches are accumulated; it must be ``True`` for the last one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a bucket mixes dtypes or devices, or a parameter is in two.

    Note:
        Half-precision gradients are summed in float32 and rounded once. All ranks get the same
        bits. ``torch.autograd.grad`` sums nothing, as it accumulates nothing.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import Replicas
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> replicas = Replicas([[layer.weight]], dist.group.WORLD)
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
        checks.flag("Replicas", "overlap", overlap)
        checks.flag("Replicas", "ordered", ordered)
        if not isinstance(group, dist.ProcessGroup):
            got = checks.type_name(group)
            raise TypeError(f"Replicas: group must be a torch.distributed.ProcessGroup, got {got}")
        self.group = group
        self.overlap = overlap
        self.ordered = ordered
        self.synchronize = True
        self._running = False
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        kept = [[each for each in bucket if each.requires_grad] for bucket in buckets]
        self._buckets = [_Bucket(i, each) for i, each in enumerate(filter(None, kept))]
        _check_buckets(self._buckets)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._arrived)
            for each in self._bucket_of
            if group.size() > 1
        ]

    def begin(self, *, last: bool) -> None:
        """Say whether the next micro-batch is the last one of a step."""
        self.synchronize = last or self.ordered
        if self.ordered:
            for parameter in self._bucket_of:
                if parameter.grad is not None:
                    self._earlier[parameter], parameter.grad = parameter.grad, None

    def remove(self) -> None:
        """Stop: later backwards leave gradients as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self) -> None:
        """Begin to sum gradients that are all there, after backwards that did not.

        For loops that tell when: ``remove`` takes the hooks away, and ``finish`` waits.
        """
        self._start(lambda bucket: True)

    def finish(self) -> None:
        """Wait for what ``start`` began, and write the sums."""
        self._finish()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Note a gradient, and start every bucket that is its turn."""
        if not self.synchronize:
            return
        if not self._running:
            self._running = True
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._bucket_of[parameter].missing.discard(parameter)
        if self.overlap:
            self._start(lambda bucket: not bucket.missing)

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

    def _finish(self) -> None:
        """Start what is left, wait for all, and write the sums."""
        try:
            self._start(lambda bucket: True)
            for bucket in self._buckets:
                assert bucket.pending is not None
                _unpack(bucket.pending.wait(), bucket.parameters)
            self._add_earlier()
        finally:
            self._running = False
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
        kinds = {(each.dtype, each.device) for each in bucket.parameters}
        if len(kinds) > 1:
            names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            checks.fail("Replicas", "buckets", "of one dtype and device each", names)
        if seen & set(bucket.parameters):
            checks.fail("Replicas", "buckets", "apart", "a parameter that is in two")
        seen |= set(bucket.parameters)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's part of a gradient."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _pack(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return all gradients in one tensor, and behind them which of them there are."""
    dtype = dtypes.statistics_dtype(parameters[0].dtype)
    parts = [
        _local(each if each.grad is None else each.grad).reshape(-1).to(dtype)
        for each in parameters
    ]
    parts = [
        torch.zeros_like(part) if each.grad is None else part
        for part, each in zip(parts, parameters, strict=True)
    ]
    there = [float(each.grad is not None) for each in parameters]
    return torch.cat([*parts, torch.tensor(there, dtype=dtype, device=parts[0].device)])


@torch.no_grad()
def _unpack(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Write the sums into the gradients; make those that other ranks have and this has not."""
    sizes = [_local(each).numel() for each in parameters]
    *parts, there = flat.split([*sizes, len(parameters)])
    if any(each.grad is None for each in parameters):
        for parameter, count in zip(parameters, there.tolist(), strict=True):
            if parameter.grad is None and count:
                parameter.grad = torch.zeros_like(parameter)
    pairs = [
        (_local(each.grad), part.view(_local(each).shape))
        for each, part in zip(parameters, parts, strict=True)
        if each.grad is not None
    ]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs])


def shard(
    blocks: Sequence[nn.Module | list[nn.Module]],
    mesh: DeviceMesh,
    *,
    stage: int,
    whole: set[nn.Parameter] | None = None,
    gather_again: bool = True,
) -> None:
    """Divide the parameters of modules over the ranks, by FSDP2.

    Args:
        blocks: modules, or lists of modules, whose parameters travel together: each is gathered
            before its forward. Inner ones first, the model last.
        mesh: the ranks; of one dimension, or ``[copies, ranks that divide]``.
        stage: 1, 2 or 3. From the forward to the backward 1 and 2 keep weights whole; what 1 does
            besides is up to ``DataParallel``.
        whole: parameters that are not divided; their gradients are not reduced here (``Replicas``
            does that).
        gather_again: with stage 3: gather weights again in the backward, else keep them from the
            forward on.

    Raises:
        ValueError: ``stage`` is not 1, 2 or 3.

    Note:
        Parameters become DTensors. Gradients are summed in the dtype of the parameters, in the
        order of ``communication.ordered_sum``; over the copies by FSDP2's own all-reduce.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fusedops.parallel import Sizes, make_mesh, shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = torch.nn.Linear(2, 2)
        >>> shard([layer], make_mesh(Sizes())["data"], stage=3)
        >>> type(layer.weight).__name__
        'DTensor'
        >>> dist.destroy_process_group()
    """
    if stage not in (1, 2, 3):
        checks.fail("shard", "stage", "1, 2 or 3", stage)
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            # None: all but the model itself, whose own parameters the backward wants at once.
            reshard_after_forward=None if stage == 3 and gather_again else False,
            shard_placement_fn=_placement_for(mesh),
            ignored_params=whole,
        )
        first: FSDPModule = block[0] if isinstance(block, list) else block  # type: ignore[assignment]
        first.set_gradient_divide_factor(1.0)
        first.set_force_sum_reduction_for_comms(True)
        first.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        first.set_custom_reduce_scatter(_Reduce())  # type: ignore[arg-type]


def divides(parameter: torch.Tensor, ranks: int) -> bool:
    """Whether ``shard`` can divide a parameter over so many ranks.

    Not where one dim would be divided by two meshes and unevenly, such as a bias of 19 words on 2
    ranks of tensor parallelism: torch does not put such parts together again.
    """
    before = _parts(parameter)
    dim = _divided_dim(parameter, ranks)
    return dim not in before or parameter.shape[dim] % (before[dim] * ranks) == 0


def _placement_for(mesh: DeviceMesh) -> Any:
    ranks = mesh.size(-1)
    return lambda parameter: Shard(_divided_dim(parameter, ranks))


def _divided_dim(parameter: torch.Tensor, ranks: int) -> int:
    """Return which dim of a parameter is divided: the first that is not yet and that fits.

    The first dim if none does: then parts are uneven, or the dim is divided twice.
    """
    before = _parts(parameter)
    if 0 in before:
        for dim, size in enumerate(parameter.shape):
            if dim not in before and size % ranks == 0:
                return dim
    return 0


def _parts(parameter: torch.Tensor) -> dict[int, int]:
    """Return into how many parts dims of a parameter are divided already."""
    found: dict[int, int] = {}
    if isinstance(parameter, DTensor):
        for size, each in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if isinstance(each, Shard):
                found[each.dim] = found.get(each.dim, 1) * size
    return found


class _Buffers:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a communication."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Buffers):
    """FSDP2's all-gather as one of ours."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Work | None:
        label = "weights"
        pending = collectives.all_gather(input_tensor, group, out=output_tensor, label=label)
        if async_op:
            return _Work(pending)
        pending.wait()
        return None


class _Reduce(_Buffers):
    """FSDP2's reduce-scatter as one of ours: summed by ``ordered_sum``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op
        summed = collectives.reduce_scatter(input_tensor, group, label="gradients").wait()
        output_tensor.copy_(summed.view_as(output_tensor))


class _Work:
    """A communication that FSDP2 waits for."""

    def __init__(self, pending: collectives.Pending) -> None:
        self._pending = pending

    def wait(self) -> bool:
        """Wait for it."""
        self._pending.wait()
        return True


@dataclass
class DataParallel:
    """The data parallelism of a model: what sums its gradients, and when.

    Attributes:
        replicas: of the parameters that are whole on each rank.
        sharded: modules that ``shard`` divided, the one that has all others last.
        stage: of ``shard``, 0 where nothing is divided.
    """

    replicas: list[Replicas] = field(default_factory=list)
    sharded: list[nn.Module] = field(default_factory=list)
    stage: int = 0

    def begin(self, *, last: bool) -> None:
        """Say, before its forward, whether a micro-batch is the last one of a step.

        Until the last one replicas and stage 1 accumulate whole gradients and communicate nothing;
        stages 2 and 3 sum at each, for they keep gradients divided. Stages 1 and 2 keep weights
        whole up to the last one's backward.

        Args:
            last: whether it is.
        """
        for each in self.replicas:
            each.begin(last=last)
        for module in self.sharded:
            module.set_is_last_backward(last)  # type: ignore[operator]
            module.set_requires_gradient_sync(last or self.stage > 1)  # type: ignore[operator]
            module.set_reshard_after_backward(last or self.stage == 3)  # type: ignore[operator]

    def begin_part(self) -> None:
        """Say that a part of a backward follows, of one that comes in two.

        FSDP2's hooks stand where gradients of inputs pass, and those of weights come later: in a
        part they have nothing to do. All weights are whole in it, for both parts read them.
        """
        for module in self.sharded:
            module.set_is_last_backward(False)  # type: ignore[operator]
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
            module.set_reshard_after_backward(False)  # type: ignore[operator]
        for group in self._groups():
            group.unshard()
            group.wait_for_unshard()

    def end_part(self, *, weights: bool, last: bool) -> None:
        """Do what FSDP2's hooks do in a whole backward.

        Args:
            weights: whether the part made the gradients of weights.
            last: whether no other backward of the step comes.
        """
        if weights:
            self.begin(last=last)
            for module in self.sharded[-1:]:
                state = module._get_fsdp_state()  # type: ignore[operator]
                state._root_post_backward_final_callback()
        elif self.stage == 3:
            for group in self._groups():
                group.reshard()

    def _groups(self) -> list[Any]:
        """Return FSDP2's groups of parameters; the last module of ``sharded`` has all."""
        found: list[Any] = []
        for module in self.sharded[-1:]:
            for state in module._get_fsdp_state()._state_ctx.all_states:  # type: ignore[operator]
                found += state._fsdp_param_groups
        return found

    def start(self) -> None:
        """Begin to sum gradients of parameters that are whole; all of them are there."""
        for each in self.replicas:
            each.start()

    def finish(self) -> None:
        """Wait for what ``start`` began."""
        for each in self.replicas:
            each.finish()
