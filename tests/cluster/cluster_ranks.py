"""Ranks on one kind of device, which run functions of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from process_pool import Pool


@dataclass(frozen=True)
class Cluster:
    """Ranks on one kind of device."""

    device: str
    ranks: int
    pool: Pool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(device, *args)`` on every rank; return the results by rank."""
        return self.pool.run(_call, function, self.device, *args)

    def layout(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a layout of two ranks with as many replicas as there are ranks for."""
        return values | {"dp": values.get("dp", 1) * self.ranks // 2}


def _call(world: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
