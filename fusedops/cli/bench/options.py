"""What the commands of ``fusedops bench`` share: words that must be known, a device, signals."""

from __future__ import annotations

import contextlib
import difflib
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fusedops.terminal import files

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DTYPES = ("float32", "bfloat16", "float16", "float64")
ALLOCATORS = ("tuned", "system")


def words(text: str, known: Iterable[str], what: str) -> list[str]:
    """Return the words of a comma-separated list; each must be known."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise files.UserError(f"--{what} is empty; known: {', '.join(known)}")
    for word in found:
        check_known(word, known, what)
    return found


def check_known(word: str, known: Iterable[str], what: str) -> None:
    """Raise unless ``word`` is one of those known; the message has the nearest."""
    choices = list(known)
    if word in choices:
        return
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.65)
    hint = f"did you mean {near[0]}? " if near else ""
    raise files.UserError(f"unknown {what} {word!r}: {hint}known: {', '.join(choices)}")


def finite(seconds: float) -> float:
    """Return a number of seconds; raise for NaN, which is neither below nor above a limit."""
    if math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds")
    return seconds


def device(text: str) -> torch.device:
    """Return the device that ``text`` names, which must be here; a GPU is made the current one."""
    import torch

    check_known(text.partition(":")[0], ("cpu", "cuda"), "device")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise files.UserError(f"unknown device {text!r}") from None
    if found.type == "cpu" and found.index:
        raise files.UserError(f"there is no device {text}: the CPU is one device, cpu")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise files.UserError("device cuda was asked for, but this torch sees no CUDA device")
    if found.type == "cuda":
        if (found.index or 0) >= torch.cuda.device_count():
            raise files.UserError(f"there is no device {text}")
        torch.cuda.set_device(found)
    return found


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, by which ``timeout`` and batch systems end a program, do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_all(
    writers: Iterable[tuple[Path | None, Callable[[Path], object]]], out: Console
) -> None:
    """Write each file that was asked for, and tell so; one that cannot be costs no other.

    Raises:
        UserError: for all that failed, at the end.
    """
    failures = []
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
            out.print(f"wrote {path}", highlight=False, soft_wrap=True)
        except files.UserError as error:
            failures.append(str(error))
    if failures:
        raise files.UserError("; ".join(failures))
