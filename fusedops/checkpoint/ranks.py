"""The ranks that save and load together: what they tell each other, above all of failures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fusedops._core import checks
from fusedops.checkpoint.folder import Damaged
from fusedops.parallel.collective_errors import gather_errors, gather_objects, raise_on_all


class CheckpointRanks:
    """A gloo group of the ranks of a group, for the exchanges of one ``Checkpointer``."""

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

    def attempt(self, action: Callable[[], Any]) -> tuple[str | None, list[Any]]:
        """Return why an action failed on some rank (``None``: on none), and all ranks' results."""
        problem = result = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            problem = reason(error)
        problems = gather_errors(problem, self.group)
        return self._joined(problems) or None, self.gather(result)

    def first(self, action: Callable[[], Any]) -> tuple[str | None, Any]:
        """Return why an action of the first rank failed, if it did, and its result."""
        problem, results = self.attempt(action if self.rank == 0 else lambda: None)
        return problem, results[0]

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


def reason(error: BaseException) -> str:
    """Return the cause of a failure in a line: that of the system where there is one."""
    if isinstance(error, Damaged):
        return str(error)
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        # torch's error keeps those of its ranks in a dictionary.
        failures = getattr(inner, "failures", None)
        first = next(iter(failures.values()))[0] if failures else None
        inner = first or inner.__cause__ or inner.__context__
    if isinstance(inner, OSError):
        where = f" ({inner.filename})" if inner.filename else ""
        return f"{inner.strerror or inner}{where}"
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]
