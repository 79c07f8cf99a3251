"""The ranks that save and load together: their exchanges, and errors that all of them raise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import distributed as dist

from fusedops._core import checks
from fusedops.parallel.collective_errors import gather_errors, gather_objects, raise_on_all


class Ranks:
    """A gloo group of the ranks of a group, for the exchanges of one ``Checkpointer``.

    Attributes:
        group: ``None`` for a process alone.
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = _own_group(group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return gather_objects(value, self.group)

    def from_first(self, value: Any) -> Any:
        """Return the value of the first rank."""
        return self.gather(value)[0]

    def agree(self, problem: str | None) -> str | None:
        """Return the problems of all ranks, ``None`` where no rank has one."""
        return self._joined(gather_errors(problem, self.group)) or None

    def raising(self, kind: type[Exception]) -> AbstractContextManager[None]:
        """Raise an error of this kind in the block on all ranks; the block must not communicate."""
        return raise_on_all(kind, lambda errors: kind(self._joined(errors)), self.group)

    def check_same(self, op: str, name: str, value: Any) -> None:
        """Raise on all ranks unless all gave the same value: they would wait for each other."""
        given = self.gather(value)
        if len(set(given)) > 1:
            values = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(given[:8]))
            checks.fail(op, name, "the same on all ranks", values)

    def _joined(self, errors: dict[int, str]) -> str:
        named = self.size > 1
        return "; ".join(f"rank {rank}: {text}" if named else text for rank, text in errors.items())


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks: a thread's exchanges must not meet the trainer's."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.new_group(ranks, backend="gloo")
    # Without the other ranks torch names a group by how many its ranks are in already, and they
    # wait for ever where that differs: it is made the same.
    c10d: Any = dist.distributed_c10d
    counts = gather_objects(len(c10d._world.pg_names), group)
    for _ in range(max(counts) - counts[dist.get_rank(group)]):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
