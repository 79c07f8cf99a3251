"""How a command ends on several processes: a line of the first one, and an exit code of all.

The codes: 1 when something failed on the way, 2 for what the user can put right.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fusedops._core import env
from fusedops.terminal import files


@contextmanager
def report_errors_once(*, lost: str = "") -> Iterator[None]:
    """Turn errors that a command may end with into a line of rank 0 and an exit code of all.

    Args:
        lost: what can be done when other processes are gone, which every process reports.
    """
    try:
        yield
    except Exception as error:
        code = _code(error)
        if code is None and not _is_lost(error):
            raise
        if code is None:
            text = str(error).strip().splitlines()[0]
            print_message(f"fusedops: error: the other processes are gone ({text}){lost}")
        elif env.is_first() or _is_of_one_process(error):
            print_message(f"fusedops: error: {error}")
        raise SystemExit(code or 1) from None


def print_message(text: str) -> None:
    """Print a line to stderr, separate from the output."""
    print(text, file=sys.stderr, flush=True)


def _code(error: Exception) -> int | None:
    """Return the exit code of an error that has a sentence; ``None``: it is a fault of ours."""
    if isinstance(error, files.UserError):
        return 2
    from fusedops.checkpoint import CheckpointError, GuardError
    from fusedops.generation import NonFiniteLogitsError

    failures = CheckpointError, GuardError, NonFiniteLogitsError
    return 1 if isinstance(error, failures) or _is_of_one_process(error) else None


def _is_of_one_process(error: Exception) -> bool:
    """Whether each process that gets this error has to report it."""
    from fusedops.launch.job import RendezvousError

    return isinstance(error, RendezvousError)


def _is_lost(error: Exception) -> bool:
    """Whether a communication failed because another process ended."""
    import torch.distributed as dist

    network = isinstance(error, dist.DistError)
    return network or (isinstance(error, RuntimeError) and "gloo" in str(error))
