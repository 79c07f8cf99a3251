"""``fusedops train`` where something happens to a rank; started in the place of ``-m fusedops``.

faulty_train.py KIND RANK STEP train ...
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time

from fusedops.cli.main import app
from fusedops.train import loop
from fusedops.train.setup import Run


def sleep_on() -> None:
    """Hang as Python code does."""
    while True:
        time.sleep(0.1)


def hold_the_lock() -> None:
    """Hang in C without giving the interpreter's lock back: no thread of Python's goes on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it would end the sleep
    ctypes.PyDLL(None).sleep(100000)


KINDS = {"sleep": sleep_on, "lock": hold_the_lock, "segment": lambda: ctypes.string_at(0)}

if __name__ == "__main__":
    kind, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    plain = loop.backward

    def backward(run: Run) -> tuple[float, float]:
        if run.ranks.rank == rank and run.step == step:
            KINDS[kind]()
        return plain(run)

    loop.backward = backward
    app(sys.argv[4:], prog_name="fusedops")
