"""Results that a recomputed region keeps: they are not computed in its second run.

The first run keeps the results of the operators that the policy names; the second finds an operator
by its number among the calls of the same operator. ``torch.utils.checkpoint``'s selective contexts
do the same for one backward pass only; a zero-bubble schedule makes two, and a policy may put the
results into host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops.memory.recomputation.producers import new_results, written_arguments
from fusedops.memory.saved_tensors import Resident, SavedTensor, is_plain

# Saves a result of an operator, given its name there; ``None`` if it is recomputed.
Keep = Callable[[torch.Tensor, str, str | None], SavedTensor | None]
_Key = tuple[Any, int]

# Collectives that return what they received; those that write into an argument run again.
_COLLECTIVES = (
    "_c10d_functional::",
    "_c10d_functional_autograd::",
    "fusedops_parallel::",  # of parallel/tensor/layers.py
)


def communicates(op: str) -> bool:
    """Return whether an operator is a collective whose result can be kept."""
    return op.startswith(_COLLECTIVES)


class Results:
    """What the first run of a region kept."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[list[Any], Any]] = {}
        self._keys: dict[int, _Key] = {}  # by the memory of a result
        self._outputs: list[tuple[torch.Tensor, int]] = []

    def record(self, keep: Keep, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator in the first run, and keep its results if ``keep`` saves one of them."""
        func = key[0]
        result = func(*args, **kwargs)
        for written in written_arguments(func, args, kwargs):
            self.forget(written)
        # A generator must draw as often the second time: what follows would draw other numbers.
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        new = new_results(func, args, kwargs, result)
        saved = {place: keep(tensor, func._schema.name, name) for tensor, name, place in new}
        leaves, structure = pytree.tree_flatten(result)
        if any(saved.values()) and len(new) == len(leaves):
            # One result that is kept keeps the call, and so the others.
            kept = list(leaves)
            for tensor, _, place in new:
                kept[place] = saved[place] or Resident(tensor)
                self._keys[tensor.untyped_storage()._cdata] = key
            self._kept[key] = kept, structure
        return result

    def replay(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the first run kept of a call in the second run, or call the operator."""
        if key not in self._kept:
            return key[0](*args, **kwargs)
        leaves, structure = self._kept[key]
        # Another tensor each time: autograd gives a history to what an operator returns.
        given = [leaf.take().detach() if isinstance(leaf, SavedTensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(given, structure)

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the result in whose memory a tensor lies: it was written to, and is recomputed."""
        key = self._keys.pop(tensor.untyped_storage()._cdata, None)
        if key is not None:
            self._kept.pop(key, None)

    def add_outputs(self, outputs: Any) -> None:
        """Take what the region returns: others may write to it."""
        for output in pytree.tree_leaves(outputs):
            if is_plain(output) and output.untyped_storage()._cdata in self._keys:
                self._outputs.append((output.detach(), output._version))

    def forget_written_outputs(self) -> None:
        """Drop results that were written to outside of the region."""
        for output, version in self._outputs:
            if output._version != version:
                self.forget(output)


class NumberedCalls(TorchDispatchMode):
    """Numbers the calls of each operator and lets ``Results.record`` or ``replay`` handle them."""

    def __init__(self, handle: Callable[[_Key, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key = func, self._calls[func]
        self._calls[func] += 1
        return self._handle(key, args, kwargs or {})
