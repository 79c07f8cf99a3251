"""Files that a command writes and reads, with errors a user can act on.

A result is written next to its target and renamed over it, so that a full disk or an interrupt
leaves the old file intact. Every failure is a ``UserError``: one sentence that names the file and
the cause; ``one_line_errors`` turns it into that sentence on stderr and exit code 2.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class UserError(Exception):
    """What the user asked cannot be done; the message is one sentence that says why."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a ``UserError`` as one line on stderr and exit with code 2, without a traceback."""
    try:
        yield
    except UserError as error:
        print(f"fusedops: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of some types into a ``UserError`` with the same message."""
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from None


def check_environment() -> None:
    """Raise unless every variable of the environment that ops obey has a value that means one.

    Raises:
        UserError: with the variable and what it may be.
    """
    from fusedops._core import backends, env

    for message in env.mistakes(backends.BACKENDS):
        raise UserError(message)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise unless ``path`` can be written; call it before hours of work, not after.

    A file is created next to the target and removed again: permission bits alone say nothing to
    root, on a read-only mount or under a quota.

    Raises:
        UserError: with the reason; a ``-``, which is no name of a file here.
    """
    if os.fspath(path) == "-":
        raise UserError("this option writes a file and cannot print to -: give a path")
    target = _target(path)
    if _is_device(target):
        return
    try:
        handle, probe = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise _cannot_write(path, error) from None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a binary file to write; it takes the place of ``path`` when the block ends well.

    Raises:
        UserError: when it cannot be written; ``path`` is then as it was before.
    """
    target = _target(path)
    aside: Path | None = None
    try:
        if _is_device(target):
            with target.open("wb") as file:
                yield file
            return
        old = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        name = f".{target.name[:40]}.{secrets.token_hex(8)}"
        # A new file gets what the umask leaves. Until it has the mode of an old one, it is private.
        mode = 0o666 if old is None else 0o600
        handle = os.open(target.with_name(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        aside = target.with_name(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            os.chmod(aside, old)
        os.replace(aside, target)
        aside = None
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        if aside is not None:
            with suppress(OSError):
                aside.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, all or nothing (see ``replacing``)."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON, all or nothing (see ``replacing``)."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what the JSON file holds.

    Raises:
        UserError: when it cannot be read or is not JSON; the message has line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: it must be UTF-8") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise UserError(
            f"{path} is not valid JSON: {error.msg} at {where}; correct it there"
        ) from None


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder and its parents where they are missing; return it.

    Raises:
        UserError: with the reason.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create folder {path}: {error.strerror or error}; give another folder"
        ) from None
    return folder


def _target(path: str | os.PathLike[str]) -> Path:
    """Return the file that ``path`` means: a link keeps pointing where it pointed."""
    target = Path(os.path.realpath(path))
    try:
        folder = stat.S_ISDIR(target.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        folder = False
    except OSError as error:
        raise _cannot_write(path, error) from None
    if folder:
        raise UserError(f"cannot write {path}: it is a folder; give a file in it")
    if not target.parent.is_dir():
        raise UserError(
            f"cannot write {path}: folder {target.parent} does not exist; create it first"
        )
    return target


def _is_device(target: Path) -> bool:
    """Return whether ``target`` is a device or pipe: written to directly, never renamed over."""
    try:
        return not stat.S_ISREG(target.stat().st_mode)
    except OSError:
        return False


def _cannot_write(path: str | os.PathLike[str], error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}; give another place")
