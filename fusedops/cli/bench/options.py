"""What the commands of ``fusedops bench`` share: words that must be known, a device, signals."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops._core import spelling
from fusedops.terminal import files

if TYPE_CHECKING:
    import torch

    from fusedops.bench.conditions import Conditions
    from fusedops.terminal.progress import Steps

DTYPES = ("float32", "bfloat16", "float16", "float64")


def finite(seconds: float) -> float:
    """Return a number of seconds; raise for NaN, which is neither below nor above a limit."""
    if math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds")
    return seconds


# Options that several commands have.
Dtypes = Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[
    int, typer.Option(min=0, help="CPU threads; 0: one per physical core, on all sides.")
]
Allocator = Annotated[
    str, typer.Option(help="tuned or system: C allocator settings, on all sides.")
]


def seconds_per(what: str, most: float = 600) -> Any:
    """Return an option for how long something is measured."""
    return typer.Option(callback=finite, min=0.01, max=most, help=f"Time per {what}.")


SecondsPerSize = Annotated[float, seconds_per("size, direction and dtype")]
Hidden = Annotated[int, typer.Option(min=64, help="Width; heads have 64.")]
Layers = Annotated[int, typer.Option(min=1, help="Number of layers.")]
Vocabulary = Annotated[int, typer.Option(min=2, help="Size of the vocabulary.")]
JsonRecord = Annotated[Path | None, typer.Option("--json", help="Write the record.")]
JsonRows = Annotated[Path | None, typer.Option("--json", help="Write the rows.")]
SvgFile = Annotated[Path | None, typer.Option("--svg", help="Draw the rows.")]
CsvRows = Annotated[Path | None, typer.Option("--csv", help="Write the rows.")]


def conditions(
    dtype: str,
    device_name: str,
    seconds: float,
    threads: int,
    allocator: str,
    *,
    quick: bool = False,
) -> Conditions:
    """Return what the options of a command mean.

    Raises:
        UserError: a word is not known, or there is no such device.
    """
    from fusedops.bench.conditions import ALLOCATORS, Conditions

    names = words(dtype, DTYPES, "dtype")
    words(allocator, ALLOCATORS, "allocator")
    return Conditions(names, device(device_name), seconds, threads, allocator, quick)


def words(text: str, known: Iterable[str], what: str) -> list[str]:
    """Return the words of a comma-separated list; each must be known."""
    chosen = split(text)
    if not chosen:
        raise files.UserError(f"--{what} is empty; known: {', '.join(known)}")
    for word in chosen:
        check_known(word, known, what)
    return chosen


def split(text: str, separator: str = ",") -> list[str]:
    """Return the words of a list, without blanks around them; empty ones are left out."""
    return [word.strip() for word in text.split(separator) if word.strip()]


def check_known(word: str, known: Iterable[str], what: str) -> None:
    """Raise unless ``word`` is one of those known; the message has the nearest."""
    choices = list(known)
    if word in choices:
        return
    near = spelling.nearest(word, choices)
    hint = f"did you mean {near}? " if near else ""
    raise files.UserError(f"unknown {what} {word!r}: {hint}known: {', '.join(choices)}")


def device(text: str) -> torch.device:
    """Return the device that ``text`` names, which must be here; a GPU is made the current one."""
    import torch

    check_known(text.partition(":")[0], ("cpu", "cuda"), "device")
    try:
        chosen = torch.device(text)
    except RuntimeError:
        raise files.UserError(f"unknown device {text!r}: known are cpu, cuda, cuda:N") from None
    if chosen.type == "cpu" and chosen.index:
        raise files.UserError(f"there is no device {text}: the CPU is one device, cpu")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise files.UserError(
            "device cuda was asked for, but this torch sees no CUDA device: "
            "fusedops doctor shows what is installed; --device cpu measures the CPU"
        )
    if chosen.type == "cuda":
        if (chosen.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise files.UserError(
                f"there is no device {text}: this torch sees {count}, from cuda:0 on"
            )
        torch.cuda.set_device(chosen)
    return chosen


def check_transformers() -> None:
    """Raise unless the library is there that models come from."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise files.UserError(
            "the models come from transformers, which is not installed (pip install transformers)"
        ) from None


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


def reporter(progress: Steps, title: str) -> Callable[[str], None]:
    """Return a function that shows what of ``title`` is being done."""
    return lambda what: progress.describe(f"{title}: {what}")
