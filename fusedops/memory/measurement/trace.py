"""What is allocated while a model takes one step: by whom, where, and until when.

A dispatch mode sees every tensor that an operator makes and when its memory is freed; what a kernel
allocates and frees inside itself it does not see (``runtime/peak.py`` counts that, and knows no
names). Markers around layers note which layer runs: forward when it is called, backward when the
gradient of its output arrives. A step may have several micro-batches, in any order.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from fusedops.memory import wrap
from fusedops.memory.layers import names_of, outer_names, runs
from fusedops.memory.recomputation.producers import new_results
from fusedops.memory.saved_tensors import memory_of

FORWARD, BACKWARD = "forward", "backward"
CAST = "cast"


@dataclass
class TracedBlock:
    """Memory that an operator allocated, and the points of the timeline at its begin and end."""

    nbytes: int
    op: str  # the operator that made it
    output: str | None  # the result's name, if it has one
    layer: str  # the layer that ran
    key: int  # tells it from other memory while it lives
    begin: int
    end: int | None = None
    # ``"activation"``, ``"gradient"`` (of a weight), ``"cast"`` (a weight in autocast's dtype) or
    # ``"temporary"``
    kind: str = "temporary"


class AllocationTrace(TorchDispatchMode):
    """Records the memory of a step while it is entered, until ``close``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks: list[TracedBlock] = []
        self.timeline: list[tuple[int, str, str]] = []  # live bytes, layer, phase
        self.layer = ""  # that runs, or whose backward began last
        self.depth = 0  # of the layers whose forward runs
        self._weights = memory_of(model.parameters())
        self._live = 0
        self._closed = False
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # of a DTensor: its operators on the local parts are recorded
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            return result
        is_cast = func is torch.ops.aten._to_copy.default and memory_of(args[:1]) & self._weights
        for tensor, name, _ in new_results(func, args, kwargs, result):
            storage = tensor.untyped_storage()
            if storage in self._seen:
                continue
            self._seen.add(storage)
            nbytes, begin = storage.nbytes(), len(self.timeline)
            block = TracedBlock(
                nbytes, func._schema.name, name, self.current_layer(), storage._cdata, begin
            )
            if is_cast:
                block.kind = CAST
            self.blocks.append(block)
            self._add_point(nbytes)
            finalizer = weakref.finalize(storage, self._free, block)
            finalizer.atexit = False  # type: ignore[misc]
        return result

    def _free(self, block: TracedBlock) -> None:
        if not self._closed:
            block.end = len(self.timeline)
            self._add_point(-block.nbytes)

    def _add_point(self, nbytes: int) -> None:
        self._live += nbytes
        self.timeline.append((self._live, self.current_layer(), phase()))

    def current_layer(self) -> str:
        """Return the layer that runs now; empty outside of all."""
        return self.layer if self.depth or phase() == BACKWARD else ""

    def live_blocks(self, point: int) -> list[TracedBlock]:
        """Return the blocks that are allocated at a point of the timeline."""
        return [
            block
            for block in self.blocks
            if block.begin <= point and (block.end is None or block.end > point)
        ]

    def close(self, gradients: Iterable[torch.Tensor]) -> None:
        """End the trace and set each block's kind.

        An activation was made by a forward and is alive when a backward begins. Nothing is recorded
        after this.

        Args:
            gradients: of the weights.
        """
        self._closed = True
        phases = [FORWARD, *(point[2] for point in self.timeline)]
        backwards = [  # points at which one begins
            point
            for point in range(len(self.timeline))
            if phases[point : point + 2] == [FORWARD, BACKWARD]
        ]
        memory = memory_of(gradients)
        for block in self.blocks:
            following = bisect.bisect_right(backwards, block.begin)
            is_saved = following < len(backwards) and (
                block.end is None or block.end >= backwards[following]
            )
            if is_saved and block.kind != CAST and self.timeline[block.begin][2] == FORWARD:
                block.kind = "activation"
            if block.end is None and block.key in memory:
                block.kind = "gradient"


def phase() -> str:
    """Return ``BACKWARD`` inside of autograd's backward, where a recomputed forward is too."""
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


class LayerMarker:
    """Runs around a layer and tells the trace which layer runs."""

    def __init__(self, trace: AllocationTrace, name: str) -> None:
        self._trace = trace
        self._name = name
        self.ran = False

    def __call__(
        self, call: wrap.ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the layer."""
        self.ran = True
        trace, outside = self._trace, self._trace.current_layer()
        trace.layer, trace.depth = self._name, trace.depth + 1
        try:
            result = call(*args, **kwargs)
        finally:
            trace.layer, trace.depth = outside, trace.depth - 1
        if phase() == FORWARD:
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)
        return result

    def _begin_backward(self, grad: torch.Tensor) -> None:
        self._trace.layer = self._name


@contextlib.contextmanager
def layer_markers(
    model: nn.Module, trace: AllocationTrace, idle: Collection[str] = ()
) -> Iterator[dict[str, LayerMarker]]:
    """Put markers around the layers, except those whose work a fused parent does.

    The forward of ``idle`` layers does not run: their submodules, called from outside, get markers.
    """
    markers: dict[str, LayerMarker] = {}
    named = dict(model.named_modules())
    before = {module for module in named.values() if wrap.unsupported_reason(module) is not None}
    try:
        for name, layer in names_of(model).items():
            module = named.get(name)
            if not name or module is None or not runs(module) or layer not in (name, *idle):
                continue
            markers[name] = LayerMarker(trace, layer)
            wrap.wrap(module, markers[name])
            parents = [named[parent] for parent in ("", *outer_names(name), name)]
            if any(wrap.unsupported_reason(p) is not None and p not in before for p in parents):
                wrap.unwrap(module)
                del markers[name]
        yield markers
    finally:
        for name in markers:
            wrap.unwrap(named[name])
