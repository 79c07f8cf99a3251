"""What a model with a policy does with each tensor that its forward saves.

All wrapped modules of a model share one ``PolicyState``. It knows which modules are running, asks
the policy about each tensor, and recognises memory that it holds already: what several autograd
nodes save is stored once, whatever views they save.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops.memory.buffers import Buffers
from fusedops.memory.offloading.offloader import Offloader, OffloadSettings
from fusedops.memory.policy import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    MemoryRule,
    Policy,
    SavedTensorInfo,
    winning_rule,
)
from fusedops.memory.recomputation.checkpointed_region import Region, Slice, worth_slicing
from fusedops.memory.recomputation.producers import (
    ProducerTracker,
    RecomputedStorage,
)
from fusedops.memory.recomputation.selective import Keep, communicates
from fusedops.memory.saved_tensors import (
    Resident,
    SavedTensor,
    SavedView,
    SharedStorage,
    is_plain,
    lasting,
    memory_of,
    take,
)
from fusedops.memory.wrap import ForwardCall

# A view that needs less than this part of its memory is no reason to move all of it.
_PART = 1 / 8


class PolicyState:
    """The state of a policy on a model, whose parameters and buffers stay where they are."""

    def __init__(self, model: nn.Module, policy: Policy, settings: OffloadSettings) -> None:
        self.model = model
        self.policy = policy
        self.settings = settings
        self._forget()

    def _forget(self) -> None:
        self._running: list[tuple[str, frozenset[MemoryRule]]] = []
        self._regions = 0
        self._packs = False
        self._producers: ProducerTracker | None = None
        self._storages: weakref.WeakValueDictionary[Any, SharedStorage] = (
            weakref.WeakValueDictionary()
        )
        self.offloaders: dict[torch.device, Offloader] = {}
        self._steady: frozenset[int] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy starts with: nothing that belongs to a running step."""
        return {"model": self.model, "policy": self.policy, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @contextlib.contextmanager
    def running(self, name: str, module: nn.Module, rules: frozenset[MemoryRule]) -> Iterator[None]:
        """Take what is saved inside as saved by this module."""
        before = self._steady
        # Known by their memory: what layers read of a DTensor is neither a parameter nor a view of
        # one. FSDP2's weights come to their memory as a module begins.
        self._steady = before | memory_of(module.parameters())
        if not self._running:
            self._steady |= memory_of(self.model.buffers())
        for offloader in self.offloaders.values():
            offloader.new_group()
        self._running.append((name, rules))
        try:
            yield
        finally:
            self._running.pop()
            self._steady = before
            if self._producers is not None:
                self._producers.forget()

    @property
    def in_region(self) -> bool:
        """Whether what runs is part of a region, for the first time or again."""
        return self._regions > 0

    @contextlib.contextmanager
    def packing(self) -> Iterator[None]:
        """Hold what is saved inside as the policy says."""
        if self._packs:
            yield
            return
        with contextlib.ExitStack() as stack:
            if any(rule.of_tensors for rule in self.policy.rules):
                self._producers = stack.enter_context(ProducerTracker(self._repeats))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, take))
            self._packs = True
            try:
                yield
            finally:
                self._packs, self._producers = False, None

    def run_region(
        self,
        call: ForwardCall,
        rule: MemoryRule,
        buffers: Buffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module that entered ``running`` last as a region."""
        running = tuple(self._running)
        comm = rule.communication

        def inside(*args: Any, **kwargs: Any) -> Any:
            outside, self._running = self._running, list(running)
            self._regions += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._regions -= 1
                self._running = outside

        keep: Keep | None = None
        saves = any(other.treatment == SAVE for other in self.policy.rules)
        if saves or not comm.mp_comm_recompute:

            def keep(tensor: torch.Tensor, op: str, output: str | None) -> SavedTensor | None:
                if communicates(op) and not comm.mp_comm_recompute:
                    return Resident(tensor)
                fitting = self._fitting(tensor, op, output)
                if winning_rule(fitting, RECOMPUTE) is not None:
                    return None
                return self._hold(tensor, fitting)

        def start(tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
            slices = comm.recompute_slice_activation and is_plain(tensor) and not lasting(tensor)
            if slices and worth_slicing(tensor, comm.group):
                return Slice(tensor, comm.group, self.pack)
            return self.pack(tensor)

        return Region(inside, running[-1][0], start, buffers, keep).run(args, kwargs)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
        """Return what holds a tensor that is saved outside of regions, or starts one."""
        if lasting(tensor):
            return tensor
        if not is_plain(tensor) or tensor.untyped_storage()._cdata in self._steady:
            return Resident(tensor)
        producer = self._producers.of(tensor) if self._producers is not None else None
        fitting = self._fitting(tensor, *(producer[:2] if producer is not None else (None, None)))
        rule = winning_rule(fitting, RECOMPUTE)
        repeats = rule is not None and rule.of_tensors
        if repeats and producer is not None and producer.can_repeat(tensor):
            make = partial(RecomputedStorage, tensor, producer, self.pack)
            return SavedView(self._shared("again", tensor, make), tensor)
        return self._hold(tensor, fitting)

    def _hold(self, tensor: torch.Tensor, fitting: list[MemoryRule]) -> SavedTensor:
        """Return what holds a tensor that is saved, given the rules that fit it."""
        nbytes = tensor.untyped_storage().nbytes()
        moves = nbytes >= self.settings.least_bytes and tensor.nbytes >= _PART * nbytes
        if moves and winning_rule(fitting, OFFLOAD) is not None:
            if tensor.device not in self.offloaders:
                self.offloaders[tensor.device] = Offloader(tensor.device, self.settings)
            put = partial(self.offloaders[tensor.device].put, tensor, self._running[-1][0])
            return SavedView(self._shared(OFFLOAD, tensor, put), tensor)
        return Resident(tensor)

    def _shared(
        self, kind: str, tensor: torch.Tensor, make: Callable[[], SharedStorage]
    ) -> SharedStorage:
        """Return what holds a tensor's memory in a form, made now if no other view has made it."""
        key = tensor.untyped_storage()._cdata, kind
        source = self._storages.get(key)
        if source is None or not source.fits(tensor):
            source = self._storages[key] = make()
        return source

    def _repeats(self, op: str) -> bool:
        return any(
            rule.treatment == RECOMPUTE and rule.of_tensors and (not rule.ops or op in rule.ops)
            for rule in self.policy.rules
        )

    def _fitting(
        self, tensor: torch.Tensor, op: str | None, output: str | None
    ) -> list[MemoryRule]:
        name = self._running[-1][0] if self._running else ""
        running = frozenset[MemoryRule]().union(*(rules for _, rules in self._running))
        saved = SavedTensorInfo(
            name, op, output, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.nbytes
        )
        return [
            rule
            for rule in self.policy.rules
            if (not rule.modules or rule in running) and rule.fits(saved)
        ]
