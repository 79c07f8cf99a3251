"""What is allocated while a model takes one step: by whom, where, and until when.

A dispatch mode sees every tensor that an operator makes and when its memory is let go; what a
kernel allocates and frees inside itself it does not see (``_core/peak.py`` counts that, and knows
no names). Layers say when they begin: forward when they are called, backward when the gradient of
their output arrives. A step may have several micro-batches, in any order.
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
    layer: str = ""  # that runs, or whose backward began last
    depth: int = 0  # of the layers whose forward runs
    closed: bool = False

    def take(
        self, tensor: torch.Tensor, op: str, output: str | None, source: torch.Tensor | None = None
    ) -> None:
        """Note new memory that ``op`` made, of a cast from ``source``, and when it is let go."""
        storage = tensor.untyped_storage()
        index = len(self.blocks)
        block = TracedBlock(storage.nbytes(), op, output, self.place(), storage._cdata)
        if source is not None and source.untyped_storage()._cdata in self.weights:
            block.kind = CAST
        self.blocks.append(block)
        self.events.append(AllocationEvent(index, True, self.place(), _phase()))
        finalizer = weakref.finalize(storage, self._let_go, index)
        finalizer.atexit = False  # type: ignore[misc]

    def _let_go(self, index: int) -> None:
        if not self.closed:
            self.events.append(AllocationEvent(index, False, self.place(), _phase()))

    def place(self) -> str:
        """Return the layer that runs now; empty outside of all."""
        return self.layer if self.depth or _phase() == BACKWARD else ""

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

    def close(self, gradients: set[int]) -> None:
        """End the trace and set each block's kind.

        An activation was made by a forward and is alive when a backward begins. Nothing is noted
        after this.

        Args:
            gradients: memory of the weights' gradients.
        """
        self.closed = True
        living: set[int] = set()
        made_forward: set[int] = set()
        last = FORWARD
        for event in self.events:
            if event.phase == BACKWARD and last == FORWARD:
                for index in living & made_forward:
                    if self.blocks[index].kind != CAST:
                        self.blocks[index].kind = "activation"
            last = event.phase
            if not event.allocated:
                living.discard(event.block)
                continue
            living.add(event.block)
            if event.phase == FORWARD:
                made_forward.add(event.block)
        for index in living:
            if self.blocks[index].key in gradients:
                self.blocks[index].kind = "gradient"


def _phase() -> str:
    """Return ``BACKWARD`` inside of autograd's backward, where a recomputed forward is too."""
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


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
        trace, outside = self._trace, self._trace.place()
        trace.layer, trace.depth = self._name, trace.depth + 1
        try:
            result = call(*args, **kwargs)
        finally:
            trace.layer, trace.depth = outside, trace.depth - 1
        if _phase() == FORWARD:
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)
        return result

    def _begin_backward(self, grad: torch.Tensor) -> None:
        self._trace.layer = self._name
