"""Data parallelism with sharded parameters, by torch's FSDP2.

``shard`` divides parameters over ranks by *stage*, as ZeRO: 1 the states of the optimizer, 2
gradients as well, 3 weights as well. Sums of gradients are not divided by the number of ranks: the
caller divides the loss by the number of all tokens.

All use of FSDP2's private interface is in this file: ``gather_weights``, ``release_weights`` and
``finish_backward`` do what its hooks do, for a backward that comes in two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fusedops._core import checks
from fusedops.parallel.comm import collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    blocks: Sequence[nn.Module | list[nn.Module]],
    mesh: DeviceMesh,
    *,
    stage: int,
    ignored_params: set[nn.Parameter] | None = None,
    gather_again: bool = True,
    ordered: bool = False,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
) -> None:
    """Shard the parameters of modules over the ranks, by FSDP2.

    Args:
        blocks: modules, or lists of modules, whose parameters are gathered together before the
            forward. Inner ones first, the model last.
        mesh: the ranks; of one dimension, or ``[replicas, ranks that shard]`` (HSDP).
        stage: 1, 2 or 3. Stages 1 and 2 keep weights unsharded from the forward to the backward;
            ``GradientSync`` adds that stage 1 reduces gradients once per step.
        ignored_params: parameters that are not sharded; their gradients are not reduced here
            (``BucketedAllReduce`` does that).
        gather_again: with stage 3: gather weights again in the backward, else keep them from the
            forward on.
        ordered: add gradients in the order of ``collectives.ordered_sum`` on a GPU as well, whose
            own order depends on the number of ranks.
        param_dtype: in which weights are gathered and used; by default that of the parameters,
            which keep theirs.
        reduce_dtype: in which gradients are summed, over micro-batches as well; by default
            ``param_dtype``, and that of the parameters if there is none.
        cast_inputs: cast floating-point inputs of the modules to ``param_dtype``.

    Raises:
        ValueError: ``stage`` is not 1, 2 or 3.

    Note:
        Parameters become DTensors. Gradients are summed by ``collectives.reduce_scatter``; over
        replicas by FSDP2's own all-reduce.

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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=cast_inputs
    )
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            # None: all but the model itself, whose own parameters the backward needs first.
            reshard_after_forward=None if stage == 3 and gather_again else False,
            shard_placement_fn=lambda parameter: Shard(shard_dim(parameter, mesh.size(-1)) or 0),
            mp_policy=precision,
            ignored_params=ignored_params,
        )
        first: Any = block[0] if isinstance(block, list) else block
        first.set_gradient_divide_factor(1.0)
        first.set_force_sum_reduction_for_comms(True)
        first.set_custom_all_gather(_AllGather())
        first.set_custom_reduce_scatter(_ReduceScatter(ordered))
    if isinstance(blocks[-1], nn.Module):
        blocks[-1].register_forward_hook(_after_forward)


def shard_dim(parameter: torch.Tensor, ranks: int) -> int | None:
    """Return the dim that ``shard`` divides over so many ranks, ``None`` if it cannot.

    The first one if no mesh shards it yet, else one that is not sharded and that the ranks divide.
    Torch does not gather what two meshes shard unevenly, such as a bias of 19 entries on 2 ranks of
    tensor parallelism.
    """
    shards: dict[int, int] = {}
    if isinstance(parameter, DTensor):
        for size, place in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if isinstance(place, Shard):
                shards[place.dim] = shards.get(place.dim, 1) * size
    if 0 not in shards:
        return 0
    for dim, size in enumerate(parameter.shape):
        if dim not in shards and size % ranks == 0:
            return dim
    return 0 if parameter.shape[0] % (shards[0] * ranks) == 0 else None


def gather_weights(root: nn.Module) -> None:
    """Gather all weights below a sharded root, as FSDP2's hooks do."""
    for group in _parameter_groups(root):
        group.unshard()
        group.wait_for_unshard()


def _after_forward(model: nn.Module, *_: Any) -> None:
    """Release the weights after a forward that no backward follows.

    FSDP2 keeps those of the root, and with stages 1 and 2 all of them, for a backward: the next
    forward would use them, whatever the optimizer does to the sharded ones.
    """
    if not torch.is_grad_enabled() and model._get_fsdp_state()._is_root:  # type: ignore[operator]
        release_weights(model)


def release_weights(root: nn.Module) -> None:
    """Free gathered weights: the parameters are the sharded ones again."""
    for group in _parameter_groups(root):
        group.reshard()


def finish_backward(root: nn.Module) -> None:
    """Do what FSDP2 does at the end of a backward: reduce gradients and wait for them."""
    root._get_fsdp_state()._root_post_backward_final_callback()  # type: ignore[operator]


def recover(root: nn.Module) -> None:
    """Discard what a forward or a backward that raised has left; without one do nothing.

    Also gradients: ``zero_grad`` of a model or an optimizer reaches only those of the weights that
    are its parameters now, gathered ones or sharded ones.
    """
    context = root._get_fsdp_state()._state_ctx  # type: ignore[operator]
    if not context.post_backward_final_callback_queued and context.iter_forward_root is None:
        return
    root.reset_iter_state()  # type: ignore[operator]
    for group in _parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # since the first time it was gathered
                parameter._unsharded_param.grad = None


def _parameter_groups(root: nn.Module) -> list[Any]:
    states = root._get_fsdp_state()._state_ctx.all_states  # type: ignore[operator]
    return [group for state in states for group in state._fsdp_param_groups]


# FSDP2 calls these by names of arguments; they wait, which it takes for synchronous.
class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return memory for a communication."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        collectives.all_gather(input_tensor, group, out=output_tensor, label="weights").wait()


class _ReduceScatter(_Buffers):
    def __init__(self, ordered: bool) -> None:
        self._scatter = partial(collectives.reduce_scatter, label="gradients", ordered=ordered)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op
        output_tensor.copy_(self._scatter(input_tensor, group).wait().view_as(output_tensor))
