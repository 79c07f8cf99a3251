"""The environment variables of fusedops and Triton's, with their meaning.

C++ reads ``FUSEDOPS_MAX_ISA`` itself. Variables of launchers are in ``runtime/job_env.py``.

| variable | meaning | default |
|---|---|---|
| ``FUSEDOPS_BACKEND`` | backend to use for every op, as ``fusedops.use_backend`` | automatic |
| ``FUSEDOPS_LIBRARY`` | folder that holds the compiled libraries | ``fusedops/lib`` |
| ``FUSEDOPS_DISABLE_NATIVE`` | ``1``: do not load the compiled libraries | ``0`` |
| ``FUSEDOPS_ISAS`` | instruction sets to build, or ``all``; only the build reads it | this one |
| ``FUSEDOPS_LAUNCH_PLANS`` | ``0``: each call on a GPU goes through Python | ``1`` |
| ``FUSEDOPS_MAX_ISA`` | the CPU kernels use no more than this: see ``MAX_ISAS`` | all there is |
| ``FUSEDOPS_SANITIZE`` | sanitizers of a build of its own; only the build reads it | none |
| ``FUSEDOPS_SHARED_MEMORY`` | ``0``: processes of one machine communicate through sockets | ``1`` |
| ``FUSEDOPS_TORCHES`` | torches that a wheel is built for; only the build reads it | none |
| ``TRITON_INTERPRET`` | Triton's own: ``1`` interprets its kernels, on CPU tensors too | ``0`` |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from fusedops._core import spelling

_PREFIX = "FUSEDOPS_"
_KNOWN = (
    "BACKEND",
    "DISABLE_NATIVE",
    "ISAS",
    "LAUNCH_PLANS",
    "LIBRARY",
    "MAX_ISA",
    "SANITIZE",
    "SHARED_MEMORY",
    "TORCHES",
)

# What FUSEDOPS_MAX_ISA may be, from least to most; csrc/isa.cpp has the same list. The last two are
# for tests and slow: they give the bits of AMX on any processor with AVX512_BF16. ``amx_emulated``
# replaces the tile instructions by C++; ``amx_trapped`` executes those that were built, which
# tools/trapped_tiles.py catches.
MAX_ISAS = ("default", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated", "amx_trapped")


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
        "FUSEDOPS_DISABLE_NATIVE": ("0", "1"),
        "FUSEDOPS_LAUNCH_PLANS": ("1", "0"),
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


def launch_plans_disabled() -> bool:
    """Return whether each call on a GPU must go through Python, as the first ones do."""
    return (os.environ.get("FUSEDOPS_LAUNCH_PLANS") or "1") != "1"


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
