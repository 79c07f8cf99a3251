"""A progress bar on stderr; where stderr is no terminal, one line per step instead."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


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
