"""Progress on stderr: a bar or a line that changes; where stderr is no terminal, lines of a log."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


# Seconds between two lines of a log.
_LOG_EVERY = 10.0


class Steps:
    """Shows the progress of a long command: a line at the end of each step.

    A log grows by steps, not by every change of the text.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._what = total, 0, ""
        self._start = time.perf_counter()

    def describe(self, what: str) -> None:
        """Show what is being done."""
        self._what = what

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        what = self._what.rpartition(": ")[0] or self._what
        seconds = time.perf_counter() - self._start
        print(f"[{self._done}/{self._total}] {what} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def done(self, what: str) -> None:
        """Show that a step is done, and which."""
        self.describe(what)
        self.advance()

    def reporter(self, title: str) -> Callable[[str], None]:
        """Return a function that shows what of ``title`` is being done."""
        return lambda what: self.describe(f"{title}: {what}")


@contextlib.contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Show the progress over ``total`` steps while the block runs."""
    if not sys.stderr.isatty():  # a machine for measuring may lack rich
        yield Steps(total)
        return
    from rich.progress import TimeElapsedColumn

    progress = make_bar(TimeElapsedColumn(), transient=True)
    if not progress.console.is_terminal:
        yield Steps(total)
        return
    with progress:
        yield _Bar(progress, total)


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


@contextlib.contextmanager
def activity(what: str, *, visible: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done, and for how long, where steps are not counted.

    Args:
        what: what is being done.
        visible: whether this process shows it; of many, one does.

    Yields:
        A function that shows what is done next. Where stderr is no terminal, a log gets its text
        when ten seconds have passed since the line before, and nothing of shorter work.
    """
    if not visible or not sys.stderr.isatty():
        yield _log() if visible else lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Not stdout: it may be a file.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def _log() -> Callable[[str], None]:
    """Return a function that prints a text unless it did so within the last seconds."""
    last = time.perf_counter()

    def report(text: str) -> None:
        nonlocal last
        if time.perf_counter() - last >= _LOG_EVERY:
            last = time.perf_counter()
            print(text, file=sys.stderr, flush=True)

    return report


def make_bar(time_column: ProgressColumn, *, transient: bool = False) -> Progress:
    """Return a bar on stderr, with the number of steps, ``time_column`` and a description."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(30), MofNCompleteColumn(), time_column, TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=transient)


class _Bar(Steps):
    """The same on a bar of rich."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def describe(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self) -> None:
        self._bar.advance(self._task)
