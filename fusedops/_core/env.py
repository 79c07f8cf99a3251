"""Every environment variable that fusedops reads or sets; C++ reads ``FUSEDOPS_MAX_ISA`` itself.

| variable | meaning | default |
|---|---|---|
| ``FUSEDOPS_BACKEND`` | backend to use for every op, as ``fusedops.use_backend`` | automatic |
| ``FUSEDOPS_CPU`` | ``1``: ``import fusedops`` calls ``fusedops.cpu.enable()`` | ``0`` |
| ``FUSEDOPS_CUDA_ARCHS`` | GPUs to build for (``sm_90``); only the build reads it | all four |
| ``FUSEDOPS_LIBRARY`` | folder that holds the compiled libraries | ``fusedops/lib`` |
| ``FUSEDOPS_DISABLE_NATIVE`` | ``1``: do not load the compiled libraries | ``0`` |
| ``FUSEDOPS_ISAS`` | instruction sets to build, or ``all``; only the build reads it | this one |
| ``FUSEDOPS_MAX_ISA`` | the CPU kernels use no more than this: see ``MAX_ISAS`` | all there is |
| ``FUSEDOPS_SANITIZE`` | sanitizers of a build of its own; only the build reads it | none |
| ``FUSEDOPS_SHARED_MEMORY`` | ``0``: processes of one machine communicate through sockets | ``1`` |
| ``FUSEDOPS_TORCHES`` | torches that a wheel is built for; only the build reads it | none |
| ``TRITON_INTERPRET`` | Triton's own: ``1`` interprets its kernels, on CPU tensors too | ``0`` |
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

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fusedops._core import spelling

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_PREFIX = "FUSEDOPS_"
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KNOWN = (
    "BACKEND",
    "CPU",
    "CUDA_ARCHS",
    "DISABLE_NATIVE",
    "ISAS",
    "LIBRARY",
    "MAX_ISA",
    "SANITIZE",
    "SHARED_MEMORY",
    "TORCHES",
)

# What FUSEDOPS_MAX_ISA may be, from least to most; csrc/isa.cpp has the same list. The last one
# is for tests and slow: tests/trapped_tiles.py catches the instructions of AMX and executes them
# in software on any processor with AVX512_BF16.
MAX_ISAS = ("default", "avx2", "avx512", "avx512_bf16", "amx", "amx_trapped")


def settings() -> dict[str, str]:
    """Return fusedops' own variables that are set, unknown ones as well."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIX)}


def unknown() -> list[str]:
    """Return a sentence for each variable that is set, is named like ours, and nothing reads."""
    sentences = []
    for name in settings():
        if name.removeprefix(_PREFIX) not in _KNOWN:
            near = spelling.nearest(name.removeprefix(_PREFIX), _KNOWN)
            known = ", ".join(_PREFIX + word for word in _KNOWN)
            hint = f"did you mean {_PREFIX}{near}?" if near else f"known are {known}"
            sentences.append(f"{name} is set, but nothing reads it: {hint}")
    return sentences


def mistakes(backends: Collection[str]) -> list[str]:
    """Return a sentence for each variable that is set to an invalid value.

    Code that reads a variable reports it, not the import: ``fusedops doctor`` must run.

    Args:
        backends: what ``FUSEDOPS_BACKEND`` may name.
    """
    from fusedops._core import checks  # imports torch, which the command line does without

    choices = {
        "FUSEDOPS_BACKEND": backends,
        "FUSEDOPS_CPU": ("0", "1"),
        "FUSEDOPS_DISABLE_NATIVE": ("0", "1"),
        "FUSEDOPS_MAX_ISA": MAX_ISAS,
        "FUSEDOPS_SHARED_MEMORY": ("1", "0"),
    }
    sentences = []
    for name, known in choices.items():
        try:
            checks.choice(name, "value", os.environ.get(name) or next(iter(known)), known)
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def backend() -> str | None:
    """Return the backend that ``FUSEDOPS_BACKEND`` asks for, or ``None``."""
    return os.environ.get("FUSEDOPS_BACKEND") or None


def library_folder() -> Path:
    chosen = os.environ.get("FUSEDOPS_LIBRARY")
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "lib"


def native_disabled() -> bool:
    """Return whether the compiled libraries must not be loaded.

    A value that means nothing (``mistakes``) is no reason to load them: ``true`` must not mean no.
    """
    return (os.environ.get("FUSEDOPS_DISABLE_NATIVE") or "0") != "0"


def replaces_torch_products() -> bool:
    """Return whether ``import fusedops`` calls ``fusedops.cpu.enable``."""
    return os.environ.get("FUSEDOPS_CPU") == "1"


def shared_memory_disabled() -> bool:
    """Return whether processes of one machine must not communicate through shared memory."""
    return (os.environ.get("FUSEDOPS_SHARED_MEMORY") or "1") != "1"


@contextlib.contextmanager
def shared_memory_set(allowed: bool) -> Iterator[None]:
    """Set ``FUSEDOPS_SHARED_MEMORY`` while the block runs, for groups that connect in it."""
    name = f"{_PREFIX}SHARED_MEMORY"
    before = os.environ.get(name)
    os.environ[name] = str(int(allowed))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def max_isa() -> str | None:
    """Return what ``FUSEDOPS_MAX_ISA`` is set to, or ``None``; a word that means nothing is none.

    The kernels read it when they are loaded, once for the process.
    """
    asked = os.environ.get("FUSEDOPS_MAX_ISA")
    return asked if asked in MAX_ISAS else None


def triton_interpreted() -> bool:
    """Return whether Triton runs its kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def launched() -> tuple[int, int, int] | None:
    """Return (rank, number of ranks, rank on this machine) of a process that torchrun started."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    places = [os.environ[name] for name in ("RANK", "WORLD_SIZE")]
    places.append(os.environ.get("LOCAL_RANK", places[0]))
    if not all(place.isdecimal() for place in places):
        return None  # launch/job.py reports it
    rank, size, local = map(int, places)
    return rank, size, local


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
