"""A pytest plugin: every model that a test of transformers builds is patched, and what ran is kept.

``hf_model_tests.py`` loads it into two runs, of which one patches. Both write a line of JSON per
test: its outcome, the calls of fused ops, and why it failed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import fusedops
from fusedops.integrations import kernels


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedops")
    group.addoption("--patched", action="store_true", help="patch every model that a test builds")
    group.addoption("--level", default="O2", help="level at which models are patched")
    group.addoption("--outcomes", type=Path, help="file to which a line per test is appended")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("patched"):
        kernels.register(level=config.getoption("level"))
    if config.getoption("outcomes"):
        config.pluginmanager.register(Recorder(config.getoption("outcomes")))


class Recorder:
    """Appends lines to a file, one when a test starts: a crash shows which one it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: dict[str, list[pytest.TestReport]] = {}

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports[nodeid] = []
        self.write(test=nodeid, outcome="unfinished")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Let both runs draw the same numbers, whichever tests ran before."""
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        common = sys.modules.get("tests.test_modeling_common")
        if common is not None:
            common.global_rng.seed(0)
        fusedops.reset_counters()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports[report.nodeid].append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        reports = self.reports.pop(nodeid)
        failures = [report for report in reports if report.failed]
        skipped = any(each.skipped for each in reports if type(each) is pytest.TestReport)
        ops: dict[str, int] = {}
        for (op, _), count in fusedops.counters().items():
            ops[op] = ops.get(op, 0) + count
        self.write(
            test=nodeid,
            outcome="failed" if failures else "skipped" if skipped else "passed",
            seconds=round(sum(each.duration for each in reports), 2),
            ops=ops,
            reason=_reason(failures[0]) if failures else "",
        )


def _reason(report: pytest.TestReport) -> str:
    """Return the exception of a failed test in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]
