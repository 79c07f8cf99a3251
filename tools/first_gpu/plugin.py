"""A pytest plugin for tests on one GPU that several processes share, in a limited time.

pytest-xdist runs the tests on several processes and replaces one that has ended. A process ends
itself after a test that has destroyed its CUDA context, because every later call would fail, and
during one that hangs. Outcomes are written as they come: a run that is killed has reported them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_VALUES = "test_values_and_gradients_match_float64"
_LONGEST_TEXT = 4096
_DEAD = 70  # exit code of a process that ends itself


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("first GPU")
    group.addoption("--gpu-rows", type=Path, help="file that gets a line of JSON for each test")
    group.addoption("--gpu-until", type=float, default=float("inf"), help="end, as of time.time()")
    group.addoption("--gpu-hang", type=float, default=45.0, help="seconds after which a test hangs")
    group.addoption("--gpu-memory", type=float, default=1.0, help="share of a process")


def pytest_configure(config: pytest.Config) -> None:
    """Let the process that starts the others write what it hears from them."""
    path = config.getoption("--gpu-rows")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Rows(path))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave the other processes their part of the GPU's memory."""
    share = session.config.getoption("--gpu-memory")
    if share < 1 and hasattr(session.config, "workerinput") and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what users run, in bfloat16 before other dtypes."""
    items.sort(key=_stage)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run one test, unless the time is over, and look at the context."""
    if time.time() > item.config.getoption("--gpu-until"):
        item.add_marker(pytest.mark.skip(reason="not reached"))
    with contextlib.suppress(ValueError, OSError):  # sys.stderr of a test has no file
        faulthandler.dump_traceback_later(
            item.config.getoption("--gpu-hang"), exit=True, file=sys.__stderr__
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if error := error_of_context():
            print(f"{item.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(_DEAD)


def error_of_context() -> str | None:
    """Return the error that has destroyed the CUDA context of this process, ``None`` if it lives.

    Such an error is returned by every call from then on; any other one by one call only.
    """
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).split("\n")[0]
    return None


def _stage(item: pytest.Item) -> int:
    """Return how soon a test comes: 0 first."""
    if item.path.stem.startswith("test_hot"):
        return 0  # what users run
    if not item.name.startswith(_VALUES):
        return 3
    if "[triton-cuda-bfloat16" in item.name:
        return 0
    return 1 if "[triton-cuda" in item.name or "[cuda-cuda" in item.name else 2


class _Rows:
    """Writes a row for each test that has an outcome.

    A test that ended its process is reported by pytest-xdist, in a phase without a name.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a phase, of set-up and teardown only if they did not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        text = str(report.longrepr or "")
        reasons = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        if isinstance(report.longrepr, tuple):  # of a test that was skipped: file, line, reason
            text = report.longrepr[2]
        lines = [line for line in (*reasons, *text.strip().splitlines()[-1:]) if line]
        row = {
            "test": report.nodeid,
            "outcome": "crashed" if report.when == "???" else report.outcome,
            "seconds": round(getattr(report, "duration", 0.0), 3),
            "error": lines[0] if lines else "",
            "text": text[-_LONGEST_TEXT:] if report.outcome == "failed" else "",
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
