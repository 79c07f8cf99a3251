"""Why a checkpoint could not be written, in a line for the other ranks and the user."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException


def attempt(action: Callable[[], object]) -> str | None:
    """Return why an action failed; every error is caught, for the other ranks need the reason."""
    try:
        action()
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        return reason(error)
    return None


def reason(error: BaseException) -> str:
    """Return the cause of a failure in a line: that of the system where there is one."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = _cause(inner)
    if isinstance(inner, OSError):
        where = f" ({inner.filename})" if inner.filename else ""
        return f"{inner.strerror or inner}{where}"
    return f"{type(error).__name__}: {first_line(error)}"


def _cause(error: BaseException) -> BaseException | None:
    """Return what an error was made of; torch's keeps its ranks' in a dictionary."""
    failures = getattr(error, "failures", None)
    if failures:
        return next(iter(failures.values()))[0]
    return error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]
