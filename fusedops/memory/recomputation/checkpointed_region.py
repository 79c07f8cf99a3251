"""A module whose forward runs a second time in the backward, once, whoever asks how often.

The first run keeps the inputs and, for each tensor that autograd would have kept, a *slot*. The
first slot that is asked for makes the forward run again; its hooks fill all slots that are still
alive, in the order of the first run. Each slot hands its tensor to the node that asks, or keeps it
for that node's next run (``saved_tensors.needed_for_recomputation``). Torch's own checkpoint fills
the slots again for each pass: a schedule with separate passes for the gradients of inputs and of
weights runs every forward three times. A second backward through a graph that was kept makes the
forward run again, too.

The second run finds the state of random number generators (our ops draw their counters from them),
autocast, the choices of ``moe_route`` (``keep_routing``) and the buffers that the module writes to
(``buffers.py``) as the first run did.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusedops._core.collectives import all_gather_single
from fusedops.memory.buffers import Buffers
from fusedops.memory.recomputation.selective import Keep, NumberedCalls, Results
from fusedops.memory.saved_tensors import (
    Arguments,
    Pack,
    Rematerialized,
    SavedTensor,
    lasting,
    take,
)
from fusedops.ops import keep_routing


class _StopError(Exception):
    """The second run has filled all slots."""


class _Slot(Rematerialized):
    """A tensor that a region makes again."""

    def __init__(self, region: Region, description: tuple[Any, ...]) -> None:
        super().__init__()
        self._region = region
        self.description = description

    def fill(self, tensor: torch.Tensor) -> None:
        self._value = tensor

    def make(self) -> torch.Tensor:
        self._region.recompute()
        assert self._value is not None
        return self._value


class ForwardState:
    """Generators and autocast as they are now, to be had again."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._devices = {device: torch.cuda.get_rng_state(device) for device in devices}
        kinds = {"cpu", *(device.type for device in devices)}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state of the first run, and afterwards the current state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(self._devices), device_type="cuda"))
            torch.set_rng_state(self._cpu)
            for device, state in self._devices.items():
                torch.cuda.set_rng_state(state, device)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._cache)
                )
            yield


class Region:
    """One call of a module that is recomputed.

    ``pack`` holds the region's inputs; ``keep`` decides which results of operators are kept.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        name: str,
        pack: Pack,
        buffers: Buffers,
        keep: Keep | None = None,
    ) -> None:
        self._call = keep_routing(call)
        self._name = name
        self._pack = pack
        self._buffers = buffers
        self._keep = keep
        self._results = Results()
        self._slots: list[weakref.ref[_Slot] | None] = []
        self._lock = threading.RLock()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module for the first time."""
        args = tuple(_without_cache(value) for value in args)
        kwargs = {
            name: False if name == "use_cache" else _without_cache(value)
            for name, value in kwargs.items()
        }
        leaves = pytree.tree_leaves((args, kwargs))
        self._forward_state = ForwardState([x for x in leaves if isinstance(x, torch.Tensor)])
        self._inputs = Arguments(args, kwargs, lambda tensor: _Input(tensor, self._pack))
        with self._buffers.watched() as self._written:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._reserve, take),
                self._calls(first=True),
            ):
                result = self._call(*args, **kwargs)
            self._results.add_outputs(result)
            return result

    def _calls(self, *, first: bool) -> contextlib.AbstractContextManager[Any]:
        if self._keep is None:
            return contextlib.nullcontext()
        results = self._results
        return NumberedCalls(partial(results.record, self._keep) if first else results.replay)

    def _reserve(self, tensor: torch.Tensor) -> torch.Tensor | _Slot:
        if lasting(tensor):
            self._slots.append(None)
            return tensor
        slot = _Slot(self, _description(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def recompute(self) -> None:
        """Run the module once more and fill the slots that are alive.

        Raises:
            RuntimeError: the second run keeps other tensors than the first.
        """
        with self._lock:
            alive = [slot() if slot is not None else None for slot in self._slots]
            last = max(index for index, slot in enumerate(alive) if slot is not None)
            place = 0

            def fill(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal place
                slot = alive[place]
                if slot is not None:
                    description = _description(tensor)
                    if description != slot.description:
                        raise RuntimeError(
                            f"recompute: the second forward of {self._name} kept "
                            f"{_shown(description)} where the first kept "
                            f"{_shown(slot.description)} (tensor {place}); it must do the same "
                            "both times"
                        )
                    # The buffer will have other values again.
                    is_buffer = self._written.owns(tensor)
                    slot.fill(tensor.detach().clone() if is_buffer else tensor.detach())
                place += 1
                if place > last:
                    raise _StopError
                return tensor.detach()

            self._results.forget_written_outputs()
            args, kwargs = self._inputs.take()
            hooks = torch.autograd.graph.saved_tensors_hooks(fill, lambda tensor: tensor)
            again, written = self._forward_state.restored(), self._written.rewound(self._name)
            with contextlib.suppress(_StopError), again, written, torch.enable_grad():
                with hooks, self._calls(first=False):
                    self._call(*args, **kwargs)
            if place <= last:
                raise RuntimeError(
                    f"recompute: the second forward of {self._name} kept {place} tensors for the "
                    f"backward, the first {len(self._slots)}; it must do the same both times"
                )


class _Input(SavedTensor):
    """An input of a region."""

    def __init__(self, tensor: torch.Tensor, pack: Pack) -> None:
        self._requires_grad = tensor.requires_grad
        self._held = pack(tensor)

    def take(self) -> torch.Tensor:
        """Return it, a leaf of a new graph."""
        if isinstance(self._held, torch.Tensor):
            return self._held
        return self._held.take().detach().requires_grad_(self._requires_grad)


class Slice(Rematerialized):
    """This rank's part of a contiguous tensor; the others' are gathered when needed."""

    def __init__(self, tensor: torch.Tensor, group: Any, pack: Pack) -> None:
        super().__init__()
        self._group, self._shape = group, tensor.shape
        size = group.size()
        length = -(-tensor.numel() // size)
        part = tensor.new_zeros(length)
        mine = tensor.detach().reshape(-1)[group.rank() * length :][:length]
        part[: mine.numel()] = mine
        self._part = pack(part)

    def make(self) -> torch.Tensor:
        """Return the tensor, in a collective of the group."""
        part = take(self._part)
        gathered = part.new_empty(self._group.size() * part.numel())
        all_gather_single(gathered, part, group=self._group)
        return gathered[: self._shape.numel()].view(self._shape)


def worth_slicing(tensor: torch.Tensor, group: Any) -> bool:
    """Return whether a tensor can be sliced, and is large enough to have a part on each rank."""
    return (
        tensor.dtype.is_floating_point
        and tensor.is_contiguous()
        and tensor.numel() >= group.size() > 1
    )


def _without_cache(argument: Any) -> Any:
    """Return the argument, or ``None`` for a cache of keys and values.

    A second run would append to it again. transformers' own checkpointing leaves it out, too.
    """
    classes = type(argument).__mro__
    cached = any(cls.__module__ == "transformers.cache_utils" for cls in classes)
    return None if cached else argument


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _shown(description: tuple[Any, ...]) -> str:
    shape, dtype, device = description
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"
