"""Variables of the environment that launchers set, and those of torch that fusedops sets.

``_core/env.py`` has fusedops' own and ``launched``. Nothing else reads or sets any.

| variable | meaning | default |
|---|---|---|
| ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` | torchrun's: which process of a run this is | alone |
| ``LOCAL_WORLD_SIZE`` | torchrun's: processes on this machine | not known |
| ``MASTER_ADDR``, ``MASTER_PORT`` | torchrun's: where the process of rank 0 listens | none |
| ``PET_NNODES`` | torchrun's own: ``--processes`` is for each of so many machines | 1 |
| ``SLURM_*`` | srun's, from which ``launch/job.py`` derives torchrun's | not in Slurm |
| ``TORCHELASTIC_RESTART_COUNT`` | torchrun's: how often it restarted the run | 0 |
| ``TORCHELASTIC_RUN_ID`` | torchrun's: its agent has started this process | no agent |
| ``TORCH_FR_BUFFER_SIZE`` | torch's: collectives it remembers (``fusedops train`` sets it) | 0 |
| ``OMP_NUM_THREADS`` | torch's: threads (``fusedops train --processes`` sets it) | all cores |
| ``THP_MEM_ALLOC_ENABLE`` | torch's: ``1`` asks for huge pages (``tune_host`` sets it) | ``0`` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fusedops._core.env import launched

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def job_variables() -> dict[str, str]:
    """Return the variables of launchers that are set: torchrun's and Slurm's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _LAUNCHED or name.startswith("SLURM_")
    }


def set_job_variables(variables: Mapping[str, str]) -> None:
    """Set variables of torchrun's in a process that another launcher started."""
    os.environ.update(variables)


def has_agent() -> bool:
    """Return whether torchrun's agent has started this process, with all others of the job."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def has_nodes() -> bool:
    """Return whether torchrun's own variables say which of several machines this is."""
    return bool(os.environ.get("PET_NNODES"))


def local_ranks() -> int | None:
    """Return how many ranks the launcher has started on this machine; ``None``: it is not known."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def is_first() -> bool:
    """Return whether this process is the one of its job that reports, also before it has a rank."""
    place = launched()
    if place is None:
        return os.environ.get("SLURM_PROCID", "0") == "0"
    rank, size, _ = place
    return rank == 0 or rank >= size  # the latter is a mistake that no other process sees


def set_launched(rank: int, ranks: int) -> None:
    """Set torchrun's variables as it would on one machine: libraries ask for them."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))


def restarts() -> int:
    """Return how often torchrun has restarted the processes of this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def threads_are_set() -> bool:
    """Return whether ``OMP_NUM_THREADS`` says how many threads this process is to have."""
    return bool(os.environ.get("OMP_NUM_THREADS"))


def set_threads(count: int) -> None:
    """Set ``OMP_NUM_THREADS``, which processes that are started obey, unless it is set."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def set_flight_records(count: int) -> None:
    """Set ``TORCH_FR_BUFFER_SIZE``, which process groups that are made obey, unless it is set."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(count))


def set_huge_pages() -> bool:
    """Set ``THP_MEM_ALLOC_ENABLE`` to ``1`` unless it is set; return whether this set it."""
    if HUGE_PAGES in os.environ:
        return False
    os.environ[HUGE_PAGES] = "1"
    return True


def unset_huge_pages() -> None:
    """Take back what ``set_huge_pages`` set."""
    del os.environ[HUGE_PAGES]
