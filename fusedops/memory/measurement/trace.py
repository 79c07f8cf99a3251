"""What is allocated while a model takes one step: by whom, where, and until when.

A dispatch mode sees every tensor that an operator makes and when its memory is let go; what a
kernel allocates and frees inside itself it does not see (``_core/peak.py`` counts that, and knows
no names). Layers say when they begin: forward when they are called, backward when the gradient of
their output arrives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from fusedops.memory.recomputation.producers import new_results
from fusedops.memory.wrap import ForwardCall

FORWARD, BACKWARD = "forward", "backward"
CAST = "cast"


@dataclass
class TracedBlock:
    """Some memory."""

    nbytes: int  # its size
    op: str  # the operator that made it
    output: str | None  # the result's name, if it has one
    layer: str  # the layer that ran
    key: int  # tells it from other memory while it lives
    # ``"activation"``, ``"gradient"`` (of a weight), ``"cast"`` (a weight in autocast's dtype) or
    # ``"temporary"``
    kind: str = "temporary"


@dataclass(frozen=True)
class AllocationEvent:
    """Memory that was allocated or freed."""

    block: int
    allocated: bool
    layer: str
    phase: str


@dataclass
class AllocationTrace:
    """The blocks and events of a step, in their order; ``weights``: memory of the parameters."""

    weights: frozenset[int] = frozenset()
    blocks: list[TracedBlock] = field(default_factory=list)
    events: list[AllocationEvent] = field(default_factory=list)
    layer: str = ""
    phase: str = FORWARD

    def take(
        self, tensor: torch.Tensor, op: str, output: str | None, source: torch.Tensor | None = None
    ) -> None:
        """Note new memory that ``op`` made, of a cast from ``source``, and when it is let go."""
        storage = tensor.untyped_storage()
        index = len(self.blocks)
        block = TracedBlock(storage.nbytes(), op, output, self.layer, storage._cdata)
        if source is not None and source.untyped_storage()._cdata in self.weights:
            block.kind = CAST
        self.blocks.append(block)
        self.events.append(AllocationEvent(index, True, self.layer, self.phase))
        finalizer = weakref.finalize(storage, self._let_go, index)
        finalizer.atexit = False  # type: ignore[misc]

    def _let_go(self, index: int) -> None:
        self.events.append(AllocationEvent(index, False, self.layer, self.phase))

    def live_bytes(self) -> list[int]:
        """Return the live bytes after each event."""
        total, totals = 0, []
        for event in self.events:
            nbytes = self.blocks[event.block].nbytes
            total += nbytes if event.allocated else -nbytes
            totals.append(total)
        return totals

    def alive(self, until: int) -> list[TracedBlock]:
        """Return the blocks that live after the event of this number."""
        living: dict[int, TracedBlock] = {}
        for event in self.events[: until + 1]:
            if event.allocated:
                living[event.block] = self.blocks[event.block]
            else:
                living.pop(event.block, None)
        return list(living.values())

    def name_kinds(self, gradients: set[int]) -> None:
        """Set each block's kind after the step; ``gradients``: memory of the weights' gradients."""
        turn = next(
            (i for i, event in enumerate(self.events) if event.phase == BACKWARD), len(self.events)
        )
        at_turn = {id(block) for block in self.alive(turn - 1)} if turn else set()
        at_end = {id(block) for block in self.alive(len(self.events))}
        for block in self.blocks:
            if id(block) in at_end and block.key in gradients:
                block.kind = "gradient"
            elif id(block) in at_turn and block.kind != CAST:
                block.kind = "activation"


class AllocationTracker(TorchDispatchMode):
    """Writes a trace while it is entered."""

    def __init__(self, trace: AllocationTrace) -> None:
        super().__init__()
        self._trace = trace
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor's turn; what it calls on its local parts comes here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        source = args[0] if func is torch.ops.aten._to_copy.default else None
        for tensor, name, _ in new_results(func, args, kwargs, result):
            storage = tensor.untyped_storage()
            if storage not in self._seen and not func._schema.is_mutable:
                self._seen.add(storage)
                self._trace.take(tensor, func._schema.name, name, source)
        return result


class PlannedBlock:
    """Runs around a layer and says where the step is."""

    def __init__(self, trace: AllocationTrace, name: str) -> None:
        self._trace = trace
        self._name = name
        self.ran = False

    def __call__(self, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer."""
        self.ran = True
        trace, outside = self._trace, self._trace.layer
        trace.layer = self._name
        try:
            result = call(*args, **kwargs)
        finally:
            trace.layer = outside
        if trace.phase == FORWARD:
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)
        return result

    def _begin_backward(self, grad: torch.Tensor) -> None:
        self._trace.layer = self._name
