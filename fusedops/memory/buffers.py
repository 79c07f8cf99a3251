"""Buffers that a forward writes to, such as running statistics: a second forward restores them.

The second run of a region starts from the buffers as they were before the first run (spectral norm
reads what it writes), and afterwards they have the values of before the second run. Only buffers
that a forward writes to are copied. To find them, all are copied before the first forward, and
again after a mode (``train``, ``eval``) or a buffer that no forward writes to has changed.

Torch's kernels of batch norm do not raise the counters of writes of the running statistics. So a
first forward is judged by values as well, and buffers of one module are treated alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fusedops.memory.saved_tensors import memory_of


class _Owner:
    """A module with buffers, in its current state."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.buffers = dict(module._buffers)
        self.copies: dict[str, torch.Tensor] | None = None
        self._versions = self.versions()

    def versions(self) -> tuple[Any, ...]:
        """Return what changes when a buffer is replaced or, by most operators, written to."""
        return tuple(
            (name, id(buffer), None if buffer is None or buffer.is_inference() else buffer._version)
            for name, buffer in self.module._buffers.items()
        )

    def copy(self) -> None:
        self.copies = {
            name: _local(buffer).clone()
            for name, buffer in self.buffers.items()
            if buffer is not None
        }

    @property
    def counted_as_written(self) -> bool:
        """Whether a buffer was replaced or written to since, as far as counters tell."""
        return self._versions != self.versions()

    @property
    def has_other_values(self) -> bool:
        """Whether a buffer has other values than its copy."""
        return any(
            not torch.equal(_local(self.buffers[name]), copy)
            for name, copy in (self.copies or {}).items()
            if copy.layout is torch.strided and not copy.is_meta
        )

    def rewind(self) -> None:
        """Let the module have these buffers, with the values of the copies."""
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for name, copy in (self.copies or {}).items():
            _local(self.buffers[name]).copy_(copy)


class Written:
    """The buffers that one forward of a module has written to, and their values before."""

    def __init__(self) -> None:
        self._owners: list[_Owner] = []
        self._memory: frozenset[int] = frozenset()

    def keep(self, owners: list[_Owner]) -> None:
        """Take the modules that have such buffers, as they were before the forward."""
        self._owners = owners
        self._memory = memory_of(
            buffer for owner in owners for buffer in owner.buffers.values() if buffer is not None
        )

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of one of these buffers."""
        return bool(self._memory & memory_of([tensor]))

    @contextlib.contextmanager
    def rewound(self, name: str) -> Iterator[None]:
        """Let the buffers be as they were before that forward, and afterwards as they are now.

        Raises:
            RuntimeError: there is no copy of a buffer.
        """
        lost = next((owner for owner in self._owners if owner.copies is None), None)
        if lost is not None:
            place = f"{name}.{lost.name}" if name and lost.name else name or lost.name
            raise RuntimeError(
                f"recompute: a forward of {name or 'the model'} wrote to buffers of "
                f"{place or 'the model'} ({', '.join(lost.buffers)}), which no earlier forward "
                "did, and their values before it are lost. Leave that module out of recompute()"
            )
        now = [_Owner(owner.name, owner.module) for owner in self._owners]
        for current in now:
            current.copy()
        tensors = {
            id(buffer): buffer
            for owner in (*self._owners, *now)
            for buffer in owner.buffers.values()
            if buffer is not None and not buffer.is_inference()
        }
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors.values())):
            try:
                for recorded in self._owners:
                    recorded.rewind()
                yield
            finally:
                for current in now:
                    current.rewind()


class Buffers:
    """Which buffers of a module, and of those inside it, its forward writes to."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: set[str] = set()
        self._modes: Any = None
        self._rest: Any = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Written]:
        """Run a forward inside; what it wrote to is known afterwards."""
        owners = [
            _Owner(name, module) for name, module in self._module.named_modules() if module._buffers
        ]
        written = Written()
        if not owners:
            yield written
            return
        modes = (self._module.training, *(owner.module.training for owner in owners))
        is_first = modes != self._modes
        is_known = not is_first and self._rest == self._versions_of_rest(owners)
        for owner in owners:
            if not is_known or owner.name in self._written:
                owner.copy()
        yield written
        for owner in owners:
            # Values are compared once: on a GPU the host waits for that.
            if owner.counted_as_written or (is_first and owner.has_other_values):
                self._written.add(owner.name)
        written.keep([owner for owner in owners if owner.name in self._written])
        self._modes, self._rest = modes, self._versions_of_rest(owners)

    def _versions_of_rest(self, owners: list[_Owner]) -> Any:
        """Return the versions of the buffers that no forward has written to."""
        return [
            (owner.name, owner.versions()) for owner in owners if owner.name not in self._written
        ]


def _local(tensor: Any) -> torch.Tensor:
    """Return a buffer's own memory here, apart from its history and its counter of writes."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.data
