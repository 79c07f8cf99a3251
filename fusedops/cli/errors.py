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

    Every process reports that others are gone, and then what can be done, which is ``lost``.
    """
    try:
        yield
    except files.UserError as error:
        if env.is_first():
            print_message(f"fusedops: error: {error}")
        raise SystemExit(2) from None
    except Exception as error:
        import torch.distributed as dist

        from fusedops.checkpoint import CheckpointError, GuardError
        from fusedops.generation import NonFiniteLogitsError
        from fusedops.launch.job import RendezvousError

        # Each process that gets it has to report it.
        of_one_process = isinstance(error, RendezvousError)
        if of_one_process or isinstance(error, (CheckpointError, GuardError, NonFiniteLogitsError)):
            if of_one_process or env.is_first():
                print_message(f"fusedops: error: {error}")
        elif isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        ):
            text = str(error).strip().splitlines()[0]
            print_message(f"fusedops: error: the other processes are gone ({text}){lost}")
        else:
            raise
        raise SystemExit(1) from None


def start_processes(count: int) -> None:
    """Start this command on processes and leave with their code, unless a launcher has done so."""
    from fusedops.launch.job import join_job
    from fusedops.launch.processes import launch

    join_job()
    if env.launched() is None:
        raise SystemExit(launch(count, sys.argv[1:]))


def print_message(text: str) -> None:
    """Print a line to stderr, separate from the output."""
    print(text, file=sys.stderr, flush=True)
