"""Functions that act on every element: the operands are aligned and the parts computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedops.parallel.spatial.align import common, fit, partition_of
from fusedops.parallel.spatial.partition import Partition
from fusedops.parallel.spatial.refusals import refuse
from fusedops.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    replace_local,
    rule,
    unwrap,
    wrap,
)

_aten: Any = torch.ops.aten
# Elementwise, and no pointwise operator of their own.
_POINTWISE = {
    *("hardswish", "softsign", "tanhshrink", "logsigmoid", "hardshrink", "hardtanh", "relu6"),
    *("floor_divide", "rdiv", "rmod", "rpow", "rsub", "floordiv", "rfloordiv", "clip", "isclose"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "fill_", "zero_", "copy_"),
    *("type_as", "int", "long", "bool"),
}


def _is_pointwise(name: str) -> bool:
    base = name.removesuffix("_")
    if name in _POINTWISE or base in _POINTWISE:
        return True
    packet = getattr(_aten, base, None)
    if packet is None or base.startswith("_"):
        return False
    try:
        return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    except AttributeError:
        return False


@rule("")
def _pointwise(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function that has no rule of its own, if it is elementwise."""
    if not _is_pointwise(name):
        return refuse(name)
    if kwargs.get("out") is not None:
        refuse(f"{name} with out=")
    target = args[0] if name.endswith("_") or kwargs.get("inplace") else None
    if target is not None and not isinstance(target, SpatialTensor):
        refuse(f"{name} into a tensor that is not cut")
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    partition = common(map(partition_of, tensors)) if target is None else target._partition
    local_args = [fit(name, x, partition) for x in args]
    local_kwargs = {key: fit(name, x, partition) for key, x in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    return wrap(result, partition) if target is None else replace_local(target, result)


@rule("prelu")
def _prelu(func: Any, input: Any, weight: Any) -> Any:
    if weight.numel() > 1:
        weight = weight.view(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, input * weight)


@rule("clone", "contiguous", "detach")
@rule("to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type")
def _converted(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, SpatialTensor):
        return func(input, *map(unwrap, args), **kwargs)
    local = unwrap(input)
    result = func(local, *map(unwrap, args), **kwargs)
    return input if result is local else wrap(result, input._partition)


@rule("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d")
def _dropout(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not training or p == 0.0:
        return input
    if function_name(func).endswith("d"):  # of channels: a factor for each, alike on all ranks
        ones = [1] * (input.dim() - 2)
        factors = torch.ones((*input.shape[:2], *ones), dtype=input.dtype, device=input.device)
        return input * func(factors, p)
    local = unwrap(input)
    with _own_numbers(input._partition, local.device):
        result = func(local, p, training, inplace)
    return replace_local(input, result) if inplace else wrap(result, input._partition)


@contextmanager
def _own_numbers(partition: Partition, device: torch.device) -> Iterator[None]:
    """Random numbers that differ by rank, and leave the generators of all ranks alike."""
    place = 0
    for axis in partition.axes:
        place = place * axis.size + axis.rank
    seed = int(torch.randint(2**31, ()).item())
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed * 4099 + place)
        yield


@rule("rand_like", "randn_like")
def _random_like(func: Any, input: Any, **kwargs: Any) -> Any:
    local = input._local
    with _own_numbers(input._partition, local.device):
        return wrap(func(local, **kwargs), input._partition)


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def _new(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return func(input._local, *args, **kwargs)


@rule("register_hook", "register_post_accumulate_grad_hook")
def _hook(func: Any, input: Any, hook: Any) -> Any:
    if not input._linked:
        with torch._C.DisableTorchFunctionSubclass():
            return func(input, hook)
    partition = input._partition

    def on_part(grad: Tensor) -> Any:
        return unwrap(hook(SpatialTensor(grad, partition)))

    return func(input._local, on_part)


@rule("backward")
def _backward(func: Any, input: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, SpatialTensor):  # torch.autograd.backward of several tensors
        with torch._C.DisableTorchFunctionSubclass():
            more = args if gradient is None else (gradient, *args)
            return func(input, *more, **kwargs)
    if gradient is None:
        refuse("backward of a tensor that is not a scalar")
    local = fit("backward", gradient, input._partition)
    return func(unwrap(input), local, *args, **kwargs)
