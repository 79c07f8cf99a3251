"""Checkpoints on disk: folders that are created atomically, with a manifest of their files.

    runs/a/step-0000000100.0/      a checkpoint: tensors, one file per rank, and manifest.json
    runs/a/step-.../confirmed      a later step found the model in it to be good
    runs/a/.partial-...            one that is being written, or was when its process died
    runs/a/.removed-...            one that is being removed
    runs/a/.lock                   locked by the process that writes here, until it exits

A checkpoint is written into a ``.partial`` folder; every file is flushed to the disk, then the
manifest with the size and the SHA-256 of each, then the folder is renamed: one atomic step. What a
killed process leaves begins with a dot; nobody reads it, and the next save removes it. No file says
which checkpoint is the newest: the names do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

MANIFEST = "manifest.json"
_CONFIRMED = "confirmed"
SCHEMA = 1
_NAME = re.compile(r"step-\d+\.\d+")
_PARTIAL, _REMOVED, _LOCK = ".partial-", ".removed-", ".lock"


class Damaged(Exception):
    """A checkpoint is damaged; the message says which file, and how."""


def checkpoints(root: Path, step: int | None = None) -> list[Path]:
    """Return the folders of all checkpoints, or those of a step: the newest first, also damaged."""
    try:
        folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    folders = [folder for folder in folders if step in (None, step_of(folder))]
    return sorted(folders, key=_order, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's name says."""
    return _order(folder)[0]


def _order(folder: Path) -> tuple[int, int]:
    step, number = folder.name.removeprefix("step-").split(".")
    return int(step), int(number)


def partial(folder: Path) -> Path:
    """Return the folder into which a checkpoint is written before it is complete."""
    return folder.with_name(f"{_PARTIAL}{folder.name}")


def begin(root: Path, step: int) -> Path:
    """Return the path of a new checkpoint, and make its ``partial`` folder, which is empty.

    Leftovers of dead writers are removed. A step that is saved again gets the next number as its
    suffix: the older checkpoint stays until the new one is complete.

    Raises:
        OSError: the folder cannot be created.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name.startswith((_PARTIAL, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
    again = [_order(folder)[1] + 1 for folder in checkpoints(root, step)]
    folder = root / f"step-{step:010d}.{max(again, default=0)}"
    partial(folder).mkdir()
    return folder


def commit(folder: Path, record: dict[str, Any]) -> None:
    """Write the manifest and rename the partial folder: the checkpoint then exists.

    Every file in it was flushed; ``record`` is what the manifest says, ``files`` included.

    Raises:
        OSError: the checkpoint does not exist then.
    """
    document = {"sha256": _digest(record), "record": record}
    write(partial(folder) / MANIFEST, json.dumps(document, indent=1, sort_keys=True).encode())
    _flush(partial(folder))
    partial(folder).rename(folder)
    _flush(folder.parent)


def write(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    path.write_bytes(content)
    _flush(path)


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of files, as the manifest has them."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in names
    }


def manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of the manifest.

    Raises:
        Damaged: it is missing, incomplete, or of a later version.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        record = document["record"]
        same = document["sha256"] == _digest(record)
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{MANIFEST} is not what was written") from None
    if not same:
        raise Damaged(f"{MANIFEST} is not what was written: its checksum differs")
    if record["schema"] > SCHEMA:
        raise Damaged(f"{MANIFEST} is of version {record['schema']}, this fusedops reads {SCHEMA}")
    return record


def verify(
    folder: Path, record: dict[str, Any], names: Iterable[str], *, contents: bool = True
) -> None:
    """Raise unless files are as they were written; without ``contents`` look at sizes only.

    Raises:
        Damaged: with the first file that is not, and how.
    """
    for name in names:
        entry = record["files"][name]
        try:
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                raise Damaged(f"{name} has {size} bytes of {entry['bytes']}")
            if contents and _sha256(folder / name) != entry["sha256"]:
                raise Damaged(f"{name} is not what was written: its checksum differs")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror or error}") from None


def confirm(folder: Path) -> None:
    """Record that training went well with the state in a checkpoint; a full disk is no error."""
    with contextlib.suppress(OSError):
        (folder / _CONFIRMED).touch()


def is_confirmed(folder: Path) -> bool:
    """Return whether ``confirm`` was called for a checkpoint."""
    return (folder / _CONFIRMED).exists()


def keep_last(root: Path, count: int, damaged: Iterable[Path] = ()) -> None:
    """Remove the checkpoints that are older than the last ``count`` good ones.

    Good is what has a manifest and files of the right sizes, and is not known to be ``damaged``.
    What is not good counts for nothing, and goes when it is older, too. The newest good one that is
    confirmed stays in any case.
    """
    good, has_confirmed = 0, False
    steps: set[int] = set()
    for folder in checkpoints(root):
        is_good = folder not in set(damaged) and _looks_good(folder)
        protected = is_good and not has_confirmed and is_confirmed(folder)
        if not protected and (good >= count or step_of(folder) in steps):
            remove(folder)
        elif is_good:
            good += 1
            steps.add(step_of(folder))
            has_confirmed |= protected


def lock(root: Path, name: str = _LOCK) -> IO[bytes]:
    """Return an exclusively locked file of a folder; closing it, or the process's end, unlocks it.

    A file system without locks counts as one where nobody has the lock.

    Raises:
        BlockingIOError: another process has the lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = (root / name).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.close()
            raise BlockingIOError(error.errno, "another process saves checkpoints here") from None
    return file


def _looks_good(folder: Path) -> bool:
    try:
        record = manifest(folder)
        verify(folder, record, record["files"], contents=False)
    except Damaged:
        return False
    return True


def remove(folder: Path) -> None:
    """Remove a checkpoint; a rename first makes it invisible."""
    aside = folder.with_name(f"{_REMOVED}{folder.name}")
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
