"""What a model with a policy does with each tensor that its forward saves.

All wrapped modules of a model share one ``PolicyState``. It knows which modules are running, asks
the policy about each tensor, and recognises memory that it holds already: what several autograd
nodes save is stored once, whatever views they save.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fusedops.memory.buffers import Buffers
from fusedops.memory.offloading.offloader import Offloader, OffloadSettings
from fusedops.memory.policy import (
    LOWER,
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    MemoryRule,
    Policy,
    SavedTensorInfo,
    recomputed,
    saving_rule,
)
from fusedops.memory.recomputation.checkpointed_region import Region
from fusedops.memory.recomputation.producers import (
    Producer,
    ProducerTracker,
    is_plain,
    recomputed_storage,
)
from fusedops.memory.recomputation.selective import Keep, communicates
from fusedops.memory.recomputation.slices import Slice, worth_slicing
from fusedops.memory.saved_tensors import (
    NarrowedStorage,
    Resident,
    SavedTensor,
    SavedView,
    SharedStorage,
    lasting,
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
        self._offloaders: dict[torch.device, Offloader] = {}
        self._steady: frozenset[int] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy starts with: nothing that belongs to a running step."""
        return {"model": self.model, "policy": self.policy, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def offloaders(self) -> dict[torch.device, Offloader]:
        """What moves tensors, by device."""
        return self._offloaders

    @contextlib.contextmanager
    def running(self, name: str, module: nn.Module, rules: frozenset[MemoryRule]) -> Iterator[None]:
        """Take what is saved inside as saved by this module."""
        before = self._steady
        # Known by their memory: what layers read of a DTensor is neither a parameter nor a view of
        # one. FSDP2's weights come to their memory as a module begins.
        self._steady = before | _memory_of(module.parameters())
        if not self._running:
            self._steady |= _memory_of(self.model.buffers())
        for offloader in self._offloaders.values():
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
            if self.policy.asks_ops:
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
        keeps: bool,
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
        if keeps or not comm.mp_comm_recompute:

            def keep(tensor: torch.Tensor, op: str, output: str | None) -> SavedTensor | None:
                if communicates(op) and not comm.mp_comm_recompute:
                    return Resident(tensor)
                fitting = self._fitting(tensor, op, output)
                if recomputed(fitting) is not None:
                    return None
                saved = self._hold(tensor, saving_rule(fitting))
                return Resident(saved) if isinstance(saved, torch.Tensor) else saved

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
        rule = recomputed(fitting)
        if rule is not None and rule.of_tensors and _repeatable(tensor, producer):
            assert producer is not None
            source = self._known("again", tensor)
            return SavedView(
                source or self._know("again", recomputed_storage(tensor, producer, self.pack)),
                tensor,
            )
        return self._hold(tensor, saving_rule(fitting))

    def _hold(self, tensor: torch.Tensor, rule: MemoryRule | None) -> SavedTensor:
        if rule is not None and rule.treatment == OFFLOAD and self._worth_moving(tensor):
            source = self._known(OFFLOAD, tensor)
            if source is None:
                offloader = self._offloader(tensor.device)
                source = self._know(OFFLOAD, offloader.put(tensor, self._running[-1][0]))
            return SavedView(source, tensor)
        if rule is not None and rule.treatment == LOWER and _narrows(tensor, rule.dtype):
            assert rule.dtype is not None
            kind = (rule.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            source = self._known(kind, tensor)
            return SavedView(source or self._know(kind, NarrowedStorage(tensor, rule.dtype)), None)
        return Resident(tensor)

    def _known(self, kind: Any, tensor: torch.Tensor) -> SharedStorage | None:
        source = self._storages.get((tensor.untyped_storage()._cdata, kind))
        return source if source is not None and source.fits(tensor) else None

    def _know(self, kind: Any, source: SharedStorage) -> SharedStorage:
        self._storages[source.memory, kind] = source
        return source

    def _offloader(self, device: torch.device) -> Offloader:
        if device not in self._offloaders:
            self._offloaders[device] = Offloader(device, self.settings)
        return self._offloaders[device]

    def _worth_moving(self, tensor: torch.Tensor) -> bool:
        storage_bytes = tensor.untyped_storage().nbytes()
        return storage_bytes >= self.settings.least_bytes and tensor.nbytes >= _PART * storage_bytes

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


def keeps_results(policy: Policy) -> bool:
    """Return whether a region may have to keep results of operators inside."""
    return any(rule.treatment == SAVE for rule in policy.rules)


def _memory_of(tensors: Iterable[Any]) -> frozenset[int]:
    """Return the names of the memory that parameters or buffers, or their shards, lie in."""
    parts = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return frozenset(part.untyped_storage()._cdata for part in parts if is_plain(part))


def _repeatable(tensor: torch.Tensor, producer: Producer | None) -> bool:
    if producer is None or producer.call is None or producer.dtype != tensor.dtype:
        return False
    return producer.call.is_intact


def _narrows(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    assert dtype is not None
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize
