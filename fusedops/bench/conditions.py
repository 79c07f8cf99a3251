"""Under which conditions a command measures: dtypes, device, time, threads, allocator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedops.runtime import host
from fusedops.runtime.timer import TimingPlan

ALLOCATORS = ("tuned", "system")


@dataclass(frozen=True)
class Conditions:
    """Under which all variants are measured."""

    dtypes: list[str]  # names of dtypes
    device: torch.device  # where
    seconds: float  # time of a row
    threads: int = 0  # of the CPU; 0: one per physical core
    allocator: str = "tuned"  # a name of ``ALLOCATORS``
    quick: bool = False  # few samples

    def set_up(self) -> list[torch.dtype]:
        """Set threads and allocator of this process; return the dtypes."""
        torch.set_num_threads(self.threads or host.physical_cores())
        if self.allocator == "tuned":
            host.tune_host(threads=torch.get_num_threads())
        return [getattr(torch, name) for name in self.dtypes]

    def timing(self, quick: tuple[int, int] = (5, 15)) -> TimingPlan:
        """Return the plan of the timer; ``quick``: least and most rounds of a first look."""
        if not self.quick:
            return TimingPlan(seconds=self.seconds)
        least, most = quick
        return TimingPlan(least, most, self.seconds / 4)
