"""The folder of a run, which belongs to one run at a time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fusedops.launch.config_table import InputError
from fusedops.runtime.file_lock import try_lock

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
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot write {folder}: {why}; choose another out") from None
    try:
        if (folder / FAULTS).exists() and not (folder / FAULTS).is_dir():
            raise InputError(f"config: out must have no file of the name {FAULTS}: {folder}")
        if not try_lock(descriptor):
            owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
            raise InputError(
                f"another run writes into {folder} ({owner}): wait for it, or choose another out"
            )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{_OWNER}{os.getpid()} of {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_run_folder(folder: Path) -> bool:
    """Return whether a run writes into a folder, or did so once."""
    try:
        return (folder / _LOCK).read_bytes().startswith(_OWNER.encode())
    except OSError:
        return False
