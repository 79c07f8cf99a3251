"""Buffers that a forward writes to, such as running statistics: a second forward restores them.

The second run of a region starts from the buffers as they were before the first run (spectral norm
reads what it writes), and afterwards they have the values of before the second run. All buffers of
the region are copied before its first run. Afterwards the copies of those that were not written to
are dropped; torch's kernels of batch norm do not raise the counters of writes of the running
statistics, so floating-point buffers always count as written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fusedops.memory.saved_tensors import memory_of


class _Owner:
    """A module with buffers, and copies of them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers = dict(module._buffers)
        self._copies = {
            name: _local(buffer).clone()
            for name, buffer in self.buffers.items()
            if buffer is not None
        }
        self._versions = self._current_versions()

    def _current_versions(self) -> list[Any]:
        """Return what changes when a buffer is replaced or, by most operators, written to."""
        return [
            (name, id(buffer), None if buffer is None or buffer.is_inference() else buffer._version)
            for name, buffer in self.module._buffers.items()
        ]

    @property
    def may_be_written(self) -> bool:
        """Whether a buffer was replaced or written to since, as far as can be known."""
        floating = any(copy.is_floating_point() for copy in self._copies.values())
        return floating or self._versions != self._current_versions()

    def rewind(self) -> None:
        """Let the module have these buffers, with the values of the copies."""
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for name, copy in self._copies.items():
            _local(self.buffers[name]).copy_(copy)


class Written:
    """The buffers that one forward of a module may have written to, and their values before."""

    def __init__(self) -> None:
        self._owners: list[_Owner] = []
        self._memory: frozenset[int] = frozenset()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of one of these buffers."""
        return bool(self._memory & memory_of([tensor]))

    @contextlib.contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Run the forward of a module inside; what it wrote to is known afterwards."""
        owners = [_Owner(inner) for inner in module.modules() if inner._buffers]
        yield
        self._owners = [owner for owner in owners if owner.may_be_written]
        self._memory = memory_of(
            buffer
            for owner in self._owners
            for buffer in owner.buffers.values()
            if buffer is not None
        )

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Let the buffers be as they were before that forward, and afterwards as they are now."""
        current = [_Owner(owner.module) for owner in self._owners]
        tensors = {
            id(buffer): buffer
            for owner in (*self._owners, *current)
            for buffer in owner.buffers.values()
            if buffer is not None and not buffer.is_inference()
        }
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors.values())):
            try:
                for owner in self._owners:
                    owner.rewind()
                yield
            finally:
                for owner in current:
                    owner.rewind()


def _local(tensor: Any) -> torch.Tensor:
    """Return a buffer's own memory here, apart from its history and its counter of writes."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.data
