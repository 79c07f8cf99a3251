"""The pytest plugin of ``make test-gpu``: what matters first, in shards, results as they come.

    python -m pytest -p gpu_session tests -m gpu --shard 1/4 --record FOLDER

Values and gradients of every op in bfloat16 through Triton come first, then other dtypes and
backends, then the rest; inside of each, ops by importance (``gpu_order.py``). ``--record`` writes a
JUnit file and a table of times that are whole after every test: a run that is cut off still tells
what passed, what failed, and where the time went.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import escape, quoteattr

import gpu_order
import pytest

_VALUES = "test_values_and_gradients_match_float64"
_END = "</testsuite>\n</testsuites>\n"
# What XML 1.0 has no way to say.
_UNSPEAKABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("gpu")
    group.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts")
    group.addoption("--record", metavar="FOLDER", help="write JUnit file and times there")


def pytest_configure(config: pytest.Config) -> None:
    """Open the record."""
    try:
        index, shards = gpu_order.parse_shard(config.getoption("--shard"))
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None
    folder = config.getoption("--record")
    if folder is not None:
        name = "test-gpu" if shards == 1 else f"test-gpu-{index + 1}of{shards}"
        config.pluginmanager.register(Record(Path(folder), name))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other shards have, and sort the rest."""
    index, shards = gpu_order.parse_shard(config.getoption("--shard"))
    others = [item for item in items if gpu_order.shard_of(op_of(item), shards) != index]
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = sorted(
        (item for item in items if item not in set(others)),
        key=lambda item: (stage(item), gpu_order.rank(op_of(item))),
    )


def op_of(item: pytest.Item) -> str:
    """Return the op that a test is of: its parameter's, or the name of its file."""
    callspec = getattr(item, "callspec", None)
    spec = callspec.params.get("spec") if callspec else None
    return getattr(spec, "name", None) or item.path.stem.removeprefix("test_")


def stage(item: pytest.Item) -> int:
    """Return how soon a test comes: 0 first."""
    if not item.name.startswith(_VALUES):
        return 3
    if "[triton-cuda-bfloat16" in item.name:
        return 0
    return 1 if "[triton-cuda" in item.name or "[cuda-cuda" in item.name else 2


class Record:
    """A JUnit file and a table of times, whole after every line.

    Args:
        folder: made where it is missing.
        name: of both files.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._xml = (folder / f"{name}.xml").open("w", encoding="utf-8")
        self._times = (folder / f"{name}.csv").open("w", encoding="utf-8")
        self._xml.write('<?xml version="1.0" encoding="utf-8"?>\n<testsuites>\n')
        self._xml.write(f"<testsuite name={quoteattr(name)}>\n")
        self._place = self._xml.tell()
        _write(self._xml, _END)
        _write(self._times, "seconds,outcome,test\n")
        self._set_up: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test that has run, or one that could not be set up or taken down."""
        if report.when == "setup" and report.passed:
            self._set_up[report.nodeid] = report.duration
        elif report.when == "call" or not report.passed:
            self.add(report)

    def add(self, report: pytest.TestReport) -> None:
        """Write one test."""
        seconds = report.duration + self._set_up.pop(report.nodeid, 0.0)
        file, _, name = report.nodeid.partition("::")
        text = escape(_UNSPEAKABLE.sub("?", str(report.longrepr or "")))
        kind = "skipped" if report.skipped else "failure" if report.when == "call" else "error"
        body = "" if report.passed else f"<{kind}>{text}</{kind}>"
        case = f'<testcase classname={quoteattr(file)} name={quoteattr(name)} time="{seconds:.3f}">'
        self._xml.seek(self._place)
        self._xml.write(f"{case}{body}</testcase>\n")
        self._place = self._xml.tell()
        _write(self._xml, _END)
        name = report.nodeid.replace('"', '""')
        _write(self._times, f'{seconds:.3f},{report.outcome},"{name}"\n')

    def pytest_unconfigure(self) -> None:
        """Close both files."""
        self._xml.close()
        self._times.close()


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
