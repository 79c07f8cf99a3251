"""The forms in which the autograd graph holds a saved tensor until its backward asks for it.

Autograd passes each tensor that a node saves to a *pack hook*, keeps what the hook returns, and
passes that to an *unpack hook* when the node runs. The classes here are what pack hooks return:
each is made from a tensor and returns an equal one on every call.

A node may run twice: a zero-bubble schedule first asks for the gradients of inputs and later for
those of weights. What was recomputed or copied back for the first pass is kept for the second only
if the node has gradients left to compute (``needed_for_recomputation``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# An attribute of tensors that somebody else keeps.
_LASTING = "_fusedops_lasting"


def needed_for_recomputation() -> bool:
    """Return whether the node that runs now will run again, for gradients not asked for yet.

    It can only where the pass keeps its graph, and it will if it leads to a node which this pass
    does not run: a weight's, while the pass is one for inputs.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    node = torch._C._current_autograd_node()
    return any(fn is not None and not _runs_now(fn) for fn, _ in node.next_functions)


def _runs_now(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad returns: the pass ends there
        return True


def lasting(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lives on anyway: a leaf (a parameter, above all) or a view of one."""
    owner = tensor._base if tensor._base is not None else tensor
    if isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad):
        return True
    return getattr(owner, _LASTING, False)


def mark_lasting(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors count as lasting: what others keep, let go and bring again."""
    for tensor in tensors:
        setattr(tensor, _LASTING, True)


class SavedTensor:
    """A tensor that an autograd node has saved; the backward asks for it."""

    def take(self) -> torch.Tensor:
        """Return the tensor."""
        raise NotImplementedError


# A pack hook: returns what holds a tensor, the tensor itself where it lives on anyway.
Pack = Callable[[torch.Tensor], torch.Tensor | SavedTensor]


class Resident(SavedTensor):
    """A saved tensor that stays in device memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its history: the node that made it may be the one that holds this.
        self._tensor = tensor.detach()
        self._version = tensor._version

    def take(self) -> torch.Tensor:
        """Return the tensor; it must not have been written to."""
        check_version(self._tensor, self._version)
        return self._tensor


class Rematerialized(SavedTensor):
    """A saved tensor that is computed or copied back each time the backward asks for it."""

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None
        self._given: weakref.ref[torch.Tensor] | None = None

    def make(self) -> torch.Tensor:
        """Recompute the tensor or copy it back."""
        raise NotImplementedError

    def take(self) -> torch.Tensor:
        """Return the tensor, and keep it if the node that asks will ask again."""
        tensor = self._value
        if tensor is None and self._given is not None:
            tensor = self._given()  # a node that unpacks twice in one run
        if tensor is None:
            tensor = self.make()
        self._value = tensor if needed_for_recomputation() else None
        self._given = weakref.ref(tensor)
        return tensor


class SharedStorage:
    """The memory of several saved views, stored once: offloaded or recomputed.

    It remembers the memory that it was made of, so that the next view of the same memory finds it;
    while it lives, no other memory gets the same name. What it makes for the first view that asks
    it keeps for the others that have not asked yet.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._origin = StorageWeakRef(tensor.untyped_storage())
        self._probe = tensor.detach()  # shares the counter of writes,
        self._probe.data = tensor.new_empty(0)  # and not the memory
        self._version = tensor._version
        self._value: torch.Tensor | None = None
        self.waiting = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether this was made of what the tensor's memory holds now."""
        return not self._origin.expired() and tensor._version == self._version

    def make(self) -> torch.Tensor:
        """Recompute the tensor or copy it back."""
        raise NotImplementedError

    def get(self) -> torch.Tensor:
        """Return the tensor for one of those that wait."""
        check_version(self._probe, self._version)
        value = self._value if self._value is not None else self.make()
        self._value = value
        self.release()
        return value

    def release(self) -> None:
        """Drop one reference; the last one frees the tensor."""
        self.waiting -= 1
        if self.waiting <= 0:
            self._value = None


class SavedView(Rematerialized):
    """A tensor in the memory of a ``SharedStorage``.

    Args:
        source: what makes the memory.
        like: where in it the tensor lies, and its dtype.
    """

    def __init__(self, source: SharedStorage, like: torch.Tensor) -> None:
        super().__init__()
        self._source = source
        self._geometry = (like.size(), like.stride(), like.storage_offset())
        self._dtype = like.dtype
        self._waits = True
        source.waiting += 1

    def make(self) -> torch.Tensor:
        """Ask the source, and look at it as the tensor did."""
        if not self._waits:
            self._source.waiting += 1
        self._waits = False
        base = self._source.get()
        size, stride, offset = self._geometry
        empty = torch.empty(0, dtype=self._dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset, size, stride)

    def __del__(self) -> None:
        if getattr(self, "_waits", False):
            self._source.release()


class Arguments:
    """The arguments of a call that is repeated.

    A call may ask whether two arguments are one tensor, as ``torch.nn.MultiheadAttention`` does. So
    each tensor is stored once, and all its places get the same tensor back.

    Args:
        args: positional arguments, containers of tensors among them.
        kwargs: the others.
        hold: makes of a tensor what holds it.
    """

    def __init__(self, args: Any, kwargs: Any, hold: Pack) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._packed = {key: hold(tensor) for key, tensor in tensors.items()}
        self._leaves = [self._packed.get(id(leaf), leaf) for leaf in leaves]

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional arguments and the others."""
        values = {id(packed): take(packed) for packed in self._packed.values()}
        leaves = [values.get(id(leaf), leaf) for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)


def take(packed: torch.Tensor | SavedTensor) -> torch.Tensor:
    """Unpack what a pack hook returned."""
    return packed if isinstance(packed, torch.Tensor) else packed.take()


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise, as autograd does, where a tensor was written to since it had this version."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(tensor.shape)} {tensor.dtype} is at version {tensor._version}, and "
            f"version {version} was saved"
        )


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with memory of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def memory_of(tensors: Iterable[Any]) -> frozenset[int]:
    """Return identifiers of the memory that tensors, or the local shards of DTensors, lie in."""
    parts = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return frozenset(part.untyped_storage()._cdata for part in parts if is_plain(part))
