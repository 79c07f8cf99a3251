"""A pytest plugin: the tests of one op in a process of their own, each told as it begins and ends.

``--first-gpu-list FILE`` writes which tests there are. ``--items`` and ``--events`` run tests in
the order of the list, and look after each whether the CUDA context still lives: after an illegal
access or a device-side assert every later call fails, so that the process says which test it was
and ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from first_gpu import launches, stand_in
from first_gpu.protocol import DEAD_CONTEXT, Events, shortened

_VALUES = "test_values_and_gradients_match_float64"
_WORST = ("failed", "skipped", "passed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("first GPU")
    group.addoption("--first-gpu-list", type=Path, metavar="FILE", help="write the tests there")
    group.addoption("--items", type=Path, help="JSON list of the tests to run")
    group.addoption("--events", type=Path, help="file that gets the events")


def pytest_configure(config: pytest.Config) -> None:
    """Stand in for a GPU where the rehearsal asks for it; watch tests and launches."""
    stand_in.install_if_asked()
    if config.getoption("--events") is not None:
        config.pluginmanager.register(_Watch(config.getoption("--events")))
        launches.record(Path(os.environ["FIRST_GPU_LAUNCH"]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Write the list of tests, or keep those that are asked for, in the order asked for."""
    if (path := config.getoption("--first-gpu-list")) is not None:
        rows = [{"test": item.nodeid, "op": op_of(item), "stage": stage(item)} for item in items]
        path.write_text(json.dumps(rows))
    if (path := config.getoption("--items")) is not None:
        known = {item.nodeid: item for item in items}
        wanted = json.loads(path.read_text())
        if missing := [test for test in wanted if test not in known]:
            raise pytest.UsageError(f"{len(missing)} tests are not there, {missing[0]} for one")
        items[:] = [known[test] for test in wanted]


def op_of(item: pytest.Item) -> str:
    """Return the op that a test is of: that of its parameters, or the name of its file."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    op = getattr(parameters.get("spec"), "name", None) or parameters.get("op")
    op = op or getattr(parameters.get("call"), "op", None)
    return op if isinstance(op, str) else item.path.stem.removeprefix("test_")


def stage(item: pytest.Item) -> int:
    """Return how soon a test of an op comes: 0 first."""
    if item.path.stem.startswith("test_hot"):
        return 0  # what users run
    if not item.name.startswith(_VALUES):
        return 3
    if "[triton-cuda-bfloat16" in item.name:
        return 0
    return 1 if "[triton-cuda" in item.name or "[cuda-cuda" in item.name else 2


class _Watch:
    """Tells of each test, and ends the process when the context is dead."""

    def __init__(self, events: Path) -> None:
        self._events = Events(events)
        self._reports: list[pytest.TestReport] = []
        self._limited = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run one test and look at the context."""
        self._reports = []
        self._limit_memory()
        self._events.start(item.nodeid)
        result = yield
        outcome = min((report.outcome for report in self._reports), key=_WORST.index)
        text = "\n".join(str(report.longrepr) for report in self._reports if report.longrepr)
        facts: dict[str, Any] = {"text": shortened(text)} if text else {}
        if dead := error_of_context():
            self._events.end(item.nodeid, "crashed", error=dead, **facts)
            os._exit(DEAD_CONTEXT)
        if outcome == "failed":
            facts["error"] = _last_line(text)
            print(f"=== {item.nodeid}\n{text}", flush=True)
        self._events.end(item.nodeid, outcome, **facts)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of one phase."""
        self._reports.append(report)

    def _limit_memory(self) -> None:
        """Leave the other processes their part of the GPU's memory."""
        share = os.environ.get("FIRST_GPU_MEMORY_SHARE")
        if share is not None and not self._limited and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(float(share))
        self._limited = True


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


def _last_line(text: str) -> str:
    """Return the line of a failure that says most: the last of those that begin with ``E``."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next((line for line in lines if line), text.strip().split("\n")[-1])
