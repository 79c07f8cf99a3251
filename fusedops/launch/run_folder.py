"""The folder of a run, which belongs to one run at a time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fusedops.checkpoint.folder import lock
from fusedops.launch.config_table import InputError

_LOCK = "lock"
_OWNER = "process "  # how the lock begins
FAULTS = "faults"


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other runs out of it; the system gives it back when this one dies.

    Raises:
        InputError: another run has it, or it cannot be made.
    """
    try:
        locked = lock(folder, _LOCK)
    except BlockingIOError:
        owner = (folder / _LOCK).read_text(errors="replace").strip()
        raise InputError(
            f"another run writes into {folder} ({owner}): wait for it, or choose another out"
        ) from None
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot write {folder}: {why}; choose another out") from None
    with locked:
        if (folder / FAULTS).exists() and not (folder / FAULTS).is_dir():
            raise InputError(f"config: out must have no file of the name {FAULTS}: {folder}")
        (folder / _LOCK).write_text(f"{_OWNER}{os.getpid()} of {socket.gethostname()}\n")
        yield


def is_run_folder(folder: Path) -> bool:
    """Return whether a run writes into a folder, or did so once."""
    try:
        return (folder / _LOCK).read_bytes().startswith(_OWNER.encode())
    except OSError:
        return False
