"""What the two calls do. Each builds the libraries if they are not there.

``test``: compiles kernels on all processors, then every GPU test, one process per op and several at
a time over the one GPU, then compute-sanitizer over one sample per kernel. ``figures``: the figures
that decide whether the kernels are as fast as promised. What is measured without the libraries is
wrong: this call refuses to.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from first_gpu import figure_list, library, order, sanitized, stand_in, warm
from first_gpu.results import Results
from first_gpu.supervise import Row, Supervisor, Task

ROOT = library.ROOT
CALLS = ("test", "figures")
# Seconds of a call that are kept for what comes last: writing, and in "test" the sanitizer.
_TO_WRITE = 8.0
_TO_SANITIZE = 80.0
_TO_WARM = 0.3  # of what is left after the build


@dataclass
class Settings:
    """How a call runs.

    Attributes:
        seconds: of the whole call.
        processes: that run at a time over the one GPU.
        compilers: processes that compile before.
        ops: to be tested and measured; empty: all.
        item_seconds: after which a test or a figure hangs.
        slice_seconds: after which the tests of an op make room for those of others.
        memory: bytes of memory of the host that one process may occupy.
        environment: added to that of all processes.
    """

    seconds: float
    processes: int
    compilers: int
    ops: Sequence[str]
    item_seconds: float
    slice_seconds: float
    memory: float
    environment: dict[str, str]


class Call:
    """One call: its clock, its machine, its results."""

    def __init__(self, name: str, settings: Settings, results: Results) -> None:
        self.name, self.settings, self.results = name, settings, results
        self._end = time.monotonic() + settings.seconds - _TO_WRITE
        self.machine: dict[str, Any] = {}

    def left(self) -> float:
        """Return the seconds that this call still has."""
        return max(0.0, self._end - time.monotonic())

    def run(self) -> bool:
        """Make the call; return whether all that it was to do was done, without a failure."""
        if not self._prepare():
            return False
        {"test": self._test, "figures": self._figures}[self.name]()
        rows = self.results
        rows.step(
            f"{rows.count('passed')} passed, {rows.count('failed')} failed, "
            f"{rows.count('crashed')} ended or blocked their process, "
            f"{rows.count('skipped')} skipped; "
            f"{self.settings.seconds - _TO_WRITE - self.left():.0f} s"
        )
        return not (rows.count("failed") or rows.count("crashed"))

    def _prepare(self) -> bool:
        """Build what is missing; return whether the call can go on."""
        started = time.monotonic()
        self.machine = library.describe()
        late = None
        if self.machine["missing"]:
            late = library.build(self.left() - 30, self.results.work / "build.log")
            self.machine = library.describe()
        (self.results.work / "machine.json").write_text(json.dumps(self.machine))
        words = ", ".join(f"{key} {self.machine.get(key)}" for key in ("gpu", "torch", "triton"))
        self.results.step(f"{words}; libraries after {time.monotonic() - started:.0f} s")
        if stand_in.present():
            self.results.step("a rehearsal: no launch was made, times mean nothing")
        missing = [f"{name}: {why}" for name, why in self.machine["missing"].items()]
        if missing:
            self.results.step("not built: " + "; ".join(missing) + (f"; {late}" if late else ""))
        if self.machine["gpu"] is None:
            self.results.step("torch sees no GPU here: nothing is run")
            return False
        if missing and self.name != "test":
            self.results.step(
                "nothing is measured: without the libraries the CUDA C++ kernels do not exist and "
                "each launch takes a slower way, so that every figure would be wrong"
            )
            return False
        return True

    def _supervise(
        self, what: str, tasks: Sequence[Task], processes: int, seconds: float
    ) -> Supervisor:
        started = time.monotonic()
        supervisor = Supervisor(
            self.results.work / what, self.results.add, self.results.tick, self.settings.memory
        )
        unreached = supervisor.run(tasks, processes, seconds)
        late = f", {unreached} items not reached" if unreached else ""
        self.results.step(f"{what}: {time.monotonic() - started:.0f} s{late}")
        return supervisor

    # The call "test".

    def _test(self) -> None:
        listing = self._list_tests()
        self._warm()
        tests = self._tests(listing)
        sanitizer = sanitized.tool()
        kept = min(_TO_SANITIZE, 0.3 * self.left()) if sanitizer else 0.0
        self._supervise("tests", tests, self.settings.processes, self.left() - kept)
        if sanitizer is None:
            self.results.step("compute-sanitizer is not on this machine: no access was checked")
            return
        ops = [task.name for task in tests if task.name in warm.known_ops()]
        tasks = sanitized.tasks(sanitizer, ops, self.settings.environment)
        self._supervise("sanitizer", tasks, self.settings.processes, self.left())

    def _list_tests(self) -> Path:
        path = self.results.work / "tests.json"
        # The others use torch's own kernels on a GPU, which the stand-in has none of.
        files = list(stand_in.TESTS) if stand_in.present() else gpu_files()
        log = self.results.work / "collection.log"
        with log.open("w") as file:
            subprocess.run(
                [*_pytest(files), "--collect-only", "--first-gpu-list", str(path)],
                cwd=ROOT,
                env={**os.environ, **self.settings.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, self.left()),
            )
        if not path.exists():
            raise RuntimeError(f"the tests were not collected: {log} says why")
        return path

    def _warm(self) -> None:
        wanted = self.settings.ops or warm.known_ops()
        known = [op for op in wanted if op in warm.known_ops()]
        names = warm.items(known, self.machine["capability"])
        claims = self.results.work / "claims"
        shutil.rmtree(claims, ignore_errors=True)
        claims.mkdir()
        command = [sys.executable, "-m", "first_gpu.warm", "--claims", str(claims)]
        command += ["--capability", str(self.machine["capability"])]
        command += ["--multiprocessors", str(self.machine["multiprocessors"])]
        tasks = [
            Task(
                f"compile-{number}",
                command,
                list(names),
                self.settings.environment,
                item_seconds=self.settings.item_seconds,
                slice_seconds=float("inf"),
                most_ends=50,
                shared=True,
            )
            for number in range(self.settings.compilers)
        ]
        self._supervise("warm", tasks, self.settings.compilers, _TO_WARM * self.left())

    def _tests(self, listing: Path) -> list[Task]:
        by_op: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads(listing.read_text()):
            by_op.setdefault(row["op"], []).append(row)
        wanted = [op for op in by_op if not self.settings.ops or op in self.settings.ops]
        # Some tests have tensors of 2**31 elements; not all processes have theirs at once.
        share = f"{min(1.0, 3 / self.settings.processes):.3f}"
        tasks = []
        for op in order.smallest_first({op: len(by_op[op]) for op in wanted}):
            rows = sorted(by_op[op], key=lambda row: row["stage"])
            files = sorted({row["test"].split("::")[0] for row in rows})
            tasks.append(
                Task(
                    op,
                    _pytest(files),
                    [row["test"] for row in rows],
                    {**self.settings.environment, "FIRST_GPU_MEMORY_SHARE": share},
                    item_seconds=self.settings.item_seconds,
                    slice_seconds=self.settings.slice_seconds,
                    codes=(0, 1),  # pytest's, of sessions without and with failures
                    traced=True,
                )
            )
        return tasks

    # The call "figures".

    def _figures(self) -> None:
        figures: list[Row] = []

        def keep(row: Row) -> None:
            self.results.add({key: value for key, value in row.items() if key != "rows"})
            figures.extend(row.get("rows", ()))
            figure_list.write(figures, self.results.work)
            for each in row.get("rows", ()):
                self.results.say(figure_list.words(each))

        ceilings = self.results.work / "ceilings.json"
        ceilings.unlink(missing_ok=True)
        command = [sys.executable, "-m", "first_gpu.figures", "--ceilings", str(ceilings)]
        tasks = [
            Task(
                group,
                command,
                names,
                self.settings.environment,
                item_seconds=2 * self.settings.item_seconds,  # torch.compile of several rivals
                slice_seconds=float("inf"),
            )
            for group, names in figure_list.groups(self.settings.ops).items()
        ]
        started = time.monotonic()
        supervisor = Supervisor(
            self.results.work / "figures", keep, self.results.tick, self.settings.memory
        )
        unreached = supervisor.run(tasks, 1, self.left())
        self.results.step(
            f"{len(figures)} rows in {time.monotonic() - started:.0f} s, "
            f"{unreached} figures not reached"
        )


def gpu_files() -> list[str]:
    """Return the files of tests that have some for a GPU; to import all takes several seconds."""
    paths = (ROOT / "tests").rglob("test_*.py")
    marked = [path for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]
    return sorted(str(path.relative_to(ROOT)) for path in marked)


def _pytest(paths: Sequence[str]) -> list[str]:
    plugins = ["-p", "first_gpu.worker", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *plugins, *paths, "-m", "gpu"]
