"""``SpatialTensor``: a tensor of global shape of which this process has a part.

It has the shape that one process would see, so that functional code (windows, padding to a multiple
of something) computes with the right numbers. Every torch function that meets one is looked up in
``RULES`` and runs on the local parts, with communication where it needs rows of others. A function
without a rule is refused by its name.

A tensor that is not cut by an axis is replicated over it, value and gradient: this holds for plain
tensors, and for SpatialTensors cut by other axes. ``replicated`` makes that so where a replicated
tensor meets a cut one: its backward adds the gradients of the ranks. Parameters need nothing else.

Autograd runs on the local parts. The wrapper has an autograd node of its own, for what does not
pass through torch functions: custom functions, hooks of FSDP2, recomputation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fusedops._core import dtypes
from fusedops.parallel.comm import collectives
from fusedops.parallel.spatial.partition import Axis, Partition
from fusedops.parallel.spatial.refusals import refuse

Rule = Callable[..., Any]
# By the name of a torch function, without the underscores of special methods; "" is for all others.
RULES: dict[str, Rule] = {}

# Of special methods, where the name between the underscores is not the function's.
_SPECIAL = dict.fromkeys(("bool", "float", "int", "index"), "item") | {
    name: f"bitwise_{name}" for name in ("and", "or", "xor")
}
_SPECIAL["invert"] = "bitwise_not"
_METADATA = {
    *("dtype", "device", "shape", "ndim", "grad_fn", "grad", "names", "output_nr", "layout"),
    *("itemsize", "nbytes", "retains_grad", "requires_grad"),
}
_METADATA_CALLS = {
    *("size", "dim", "numel", "nelement", "ndimension", "hash", "element_size", "get_device"),
    *("stride", "_is_view", "storage_offset", "dim_order", "retain_grad", "requires_grad_", "len"),
}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what a torch function of one of these names does with SpatialTensors.

    The rule is called with the function and its arguments.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class SpatialTensor(torch.Tensor):
    """A tensor of which this process has a part: made by ``spatial.scatter``.

    Its ``shape`` is global. ``local`` is the part, ``partition`` says how it is cut.
    """

    _local: Tensor
    _partition: Partition
    _linked: bool

    @staticmethod
    def __new__(cls, local: Tensor, partition: Partition) -> SpatialTensor:
        """Wrap this rank's part."""
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls, partition.shape, dtype=local.dtype, device=local.device
        )
        wrapper._local, wrapper._partition, wrapper._linked = local, partition, False
        return wrapper

    @property
    def partition(self) -> Partition:
        """How the tensor is cut."""
        return self._partition

    @property
    def local(self) -> Tensor:
        """This rank's part, with its autograd graph."""
        return unwrap(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ", ".join(
            f"dim {dim} by {cut.axis.name}"
            for dim, cut in enumerate(self._partition.cuts)
            if cut is not None
        )
        shape = list(self._partition.shape)
        return f"SpatialTensor({shape}, cut in {parts}; local {list(self._local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule of a torch function."""
        kwargs = kwargs or {}
        name = function_name(func)
        if name == "__get__":
            return _attribute(func, args[0])
        if name in ("__set__", "__delete__"):
            return _assign(func, args)
        matching = RULES.get(name)
        if matching is not None:
            return matching(func, *args, **kwargs)
        if name in _METADATA_CALLS or name.startswith("is_"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return RULES[""](func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run what autograd itself calls: sums and aliases of gradients."""
        return _engine_call(func, args, kwargs or {})


def function_name(func: Any) -> str:
    """Return the name by which rules know a torch function."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return name
    if name.startswith("__") and name.endswith("__"):
        return _SPECIAL.get(name[2:-2], name[2:-2])
    return name


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, partition: Partition) -> Tensor:
        return SpatialTensor(local.detach(), partition)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (grad._local if isinstance(grad, SpatialTensor) else grad), None


class _Unlink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrapper: Any) -> Tensor:
        ctx.partition = wrapper._partition
        return wrapper._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return SpatialTensor(grad, ctx.partition)


def wrap(local: Tensor, partition: Partition) -> Any:
    """Return a SpatialTensor of a part; the part itself where nothing is cut."""
    if not partition.axes:
        return local
    if tuple(local.shape) != partition.local_shape:
        raise AssertionError(f"{tuple(local.shape)} is not {partition.local_shape}")
    if not (local.requires_grad and torch.is_grad_enabled()):
        return SpatialTensor(local, partition)
    wrapper: Any = _Link.apply(local, partition)
    wrapper._local, wrapper._linked = local, True
    return wrapper


def unwrap(x: Any) -> Any:
    """Return the part of a SpatialTensor, with its graph; anything else unchanged."""
    if not isinstance(x, SpatialTensor):
        return x
    if x._linked:
        return x._local
    with torch._C.DisableTorchFunctionSubclass():
        required = x.requires_grad
    if required and torch.is_grad_enabled():
        return _Unlink.apply(x)
    return x._local


def replace_local(x: Any, local: Tensor) -> Any:
    """Put the result of an in-place function in a SpatialTensor; returns a wrapper of it."""
    x._local, x._linked = local, True
    return wrap(local, x._partition)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axes: tuple[Axis, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axes = axes
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *gradient_sum(grads, ctx.axes)()


def replicated_all(tensors: Sequence[Any], axes: Sequence[Axis]) -> list[Any]:
    """Return tensors that are replicated over axes, for use in parts.

    Their gradients are added, in one communication. What is no tensor is unchanged.
    """
    required = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
    if not (axes and any(required) and torch.is_grad_enabled()):
        return list(tensors)
    results = iter(_Replicated.apply(tuple(axes), *itertools.compress(tensors, required)))
    pairs = zip(tensors, required, strict=True)
    return [next(results) if is_required else x for x, is_required in pairs]


def replicated(x: Any, axes: Sequence[Axis]) -> Any:
    """Return ``replicated_all`` of one tensor."""
    return replicated_all([x], axes)[0]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        return all_reduced(x, axes, label="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def summed(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the sum over axes of partial results; the gradient is everybody's."""
    return _Summed.apply(x, tuple(axes)) if axes else x


def all_reduced(x: Tensor, axes: Sequence[Axis], *, op: str = "sum", label: str = "") -> Tensor:
    """Return the reduction over all axes; not differentiable."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    for axis in axes:
        x = collectives.all_reduce(x, axis.group, op=op, label=label).wait()
    return x


def gradient_sum(
    gradients: Sequence[Tensor | None], axes: Sequence[Axis]
) -> Callable[[], list[Tensor | None]]:
    """Start to add gradients of replicated tensors over axes, in one communication.

    Gradients in half precision are added in float32 and rounded once.

    Returns:
        A function that waits for the sums, in the order and with the dtypes of the gradients.
    """
    present = [grad for grad in gradients if grad is not None]
    if not axes or not present:
        return lambda: list(gradients)
    wide = dtypes.statistics_dtype(present[0].dtype)
    total = torch.cat([grad.reshape(-1).to(wide) for grad in present])
    first = collectives.all_reduce(total, axes[0].group, label="replicated grad")

    def wait() -> list[Tensor | None]:
        flat = first.wait()
        for axis in axes[1:]:
            flat = collectives.all_reduce(flat, axis.group, label="replicated grad").wait()
        parts = iter(flat.split([grad.numel() for grad in present]))
        return [
            None if grad is None else next(parts).view(grad.shape).to(grad.dtype)
            for grad in gradients
        ]

    return wait


def _attribute(func: Any, x: Any) -> Any:
    name = func.__self__.__name__
    if name == "requires_grad" and x._linked:
        return x._local.requires_grad
    if name in _METADATA or name.startswith(("is_", "_")):
        with torch._C.DisableTorchFunctionSubclass():
            return func(x)
    if name == "data":
        return SpatialTensor(x._local.detach(), x._partition)
    if name in RULES:
        return RULES[name](func, x)
    return refuse(f"the attribute {name}")


def _assign(func: Any, args: Any) -> Any:
    name = func.__self__.__name__
    if name == "data":
        x, value = args
        x._local.data = value._local
        return None
    if name not in ("grad", "requires_grad", "_backward_hooks"):
        refuse(f"assigning the attribute {name}")
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


_ALIASES = {"aten::view", "aten::detach", "aten::alias", "aten::_unsafe_view", "aten::expand"}
_COPIES = {
    *("aten::clone", "aten::_to_copy", "aten::zeros_like", "aten::ones_like", "aten::copy_"),
    *("aten::empty_like", "aten::full_like", "aten::new_zeros", "aten::new_empty_strided"),
}


def _engine_call(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SpatialTensor)]
    partition, name = tensors[0]._partition, func._schema.name
    same = all(tensor._partition == partition for tensor in tensors)
    if same and name in _ALIASES:
        size = args[1] if len(args) > 1 else partition.shape
        if tuple(size) == partition.shape:
            return SpatialTensor(tensors[0]._local.detach(), partition)
    if same and (torch.Tag.pointwise in func.tags or name in _COPIES):
        result = func(*tree_map(_part, args), **tree_map(_part, kwargs))
        if func._schema.is_mutable:
            return args[0]
        return SpatialTensor(result, partition)
    return refuse(name)


def _part(x: Any) -> Any:
    return x._local if isinstance(x, SpatialTensor) else x
