"""``make first-gpu``: tests, memory checks and figures on a GPU, each in a limited time.

    python -m first_gpu CALL RESULTS      CALL: test, sanitize, figures or all

RESULTS gets ``summary.md`` and for each call a log and a file of rows (JSON lines). They are
written as the call goes on: what it has done is there, whatever ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from first_gpu import figure_list

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("test", "sanitize", "figures")
_TRACED = 8  # tests that ended their process, which run once more alone
_SANITIZERS = ("memcheck", "racecheck")
_FOUND = 99  # exit code of the sanitizer where it has found something
_DESCRIBE = """
import json, torch
from fusedops._core import extension
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
missing = [extension.cpu_library(), extension.cuda_library(), extension.triton_missing()]
print(json.dumps({"gpu": gpu, "torch": torch.__version__, "missing": [m for m in missing if m]}))
"""


class Results:
    """Where a call writes what it has done."""

    def __init__(self, folder: Path, call: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log, self.rows = folder, folder / f"{call}.log", folder / f"{call}.jsonl"
        for path in (self.log, self.rows):
            path.write_text("")

    def report(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        with (self.folder / "steps.txt").open("a") as file:
            file.write(line + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> int | None:
        """Run a command, its output in the log; return its exit code, ``None`` after its time."""
        with self.log.open("a") as file:
            try:
                return subprocess.run(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, seconds),
                ).returncode
            except subprocess.TimeoutExpired:
                return None


def test(asked: argparse.Namespace, results: Results, until: float) -> None:
    """Run all tests for a GPU; what ended its process runs once more, with blocking launches."""
    tests = asked.tests or gpu_files()
    command = [*_pytest(results, tests), "-n", str(asked.processes), "--maxschedchunk", "4"]
    command += ["--max-worker-restart", "500", "--gpu-until", str(until - 15)]
    command += ["--gpu-memory", f"{min(1.0, 3 / asked.processes):.3f}"]
    results.run(command, until - time.time())
    crashed = [row["test"] for row in read(results.rows) if row["outcome"] == "crashed"]
    for name in dict.fromkeys(crashed[:_TRACED]):
        if time.time() < until:
            results.run(
                _pytest(results, [name]), min(60, until - time.time()), CUDA_LAUNCH_BLOCKING="1"
            )


def sanitize(asked: argparse.Namespace, results: Results, until: float) -> None:
    """Run compute-sanitizer on the samples of each op in bfloat16, ops with figures first."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    tool = shutil.which("compute-sanitizer", path=places)
    if tool is None:
        results.report("compute-sanitizer is not on this machine: no access was checked")
        return
    from fusedops.specs import all_specs

    first = [f.op for f in figure_list.FIGURES.values() if f.op in all_specs()]
    jobs = [(kind, op) for kind in _SANITIZERS for op in dict.fromkeys((*first, *all_specs()))]

    def check(job: tuple[str, str]) -> None:
        kind, op = job
        if time.time() > until:
            results.add({"test": f"{kind} {op}", "outcome": "skipped", "error": "not reached"})
            return
        file = "tests/ops/test_all_ops.py"
        command = [tool, "--tool", kind, "--error-exitcode", str(_FOUND), "--print-limit", "20"]
        command += [sys.executable, "-m", "pytest", "-q", file, "-m", "gpu"]
        command += ["-k", f"test_values and triton-cuda-bfloat16-{op}-"]
        code = results.run(command, min(180, until - time.time()))
        outcome = {0: "passed", 5: "skipped", None: "crashed"}.get(code, "failed")
        reason = "" if code in (0, 5) else f"exit code {code}, see {results.log.name}"
        results.add({"test": f"{kind} {op}", "outcome": outcome, "error": reason})

    with ThreadPoolExecutor(asked.processes) as pool:
        list(pool.map(check, jobs))


def figures(asked: argparse.Namespace, results: Results, until: float) -> None:
    """Measure the figures, those of a group in one process; one that it ends is left out."""
    for names in figure_list.groups().values():
        remaining = list(names)
        while remaining and time.time() < until:
            command = [sys.executable, "-m", "first_gpu.figures", "--rows", str(results.rows)]
            command += remaining
            seconds = min(90.0 * len(remaining), until - time.time())
            code = results.run(command, seconds)
            done = {row["test"] for row in read(results.rows)}
            remaining = [name for name in remaining if name not in done]
            if remaining:  # the first of them has ended or blocked the process
                reason = f"exit code {code}, see {results.log.name}"
                results.add({"test": remaining.pop(0), "outcome": "crashed", "error": reason})


def gpu_files() -> list[str]:
    """Return the files of tests that have some for a GPU; others may need further packages."""
    paths = (ROOT / "tests").rglob("test_*.py")
    marked = [path for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]
    return sorted(str(path.relative_to(ROOT)) for path in marked)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a call."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def summary(folder: Path) -> str:
    """Return one page about all calls so far."""
    parts = ["# The first hour on a GPU", ""]
    for call in CALLS:
        if not (rows := read(folder / f"{call}.jsonl")):
            continue
        counts = Counter(row["outcome"] for row in rows)
        counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        parts += [f"## {call}: {counted}", ""]
        if call == "figures":
            measured = [figure for row in rows for figure in row.get("rows", ())]
            parts += [f"* {figure_list.words(figure)}" for figure in measured]
        tests_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in rows:
            if row["outcome"] in ("failed", "crashed"):
                tests_of[row["outcome"], row["error"][:200]].append(row["test"])
        for (outcome, error), tests in tests_of.items():
            parts.append(f"* {outcome}, {len(tests)} times: {error}; {tests[0]}")
        parts.append("")
    return "\n".join(parts)


def _pytest(results: Results, tests: Sequence[str]) -> list[str]:
    plugins = ["-p", "first_gpu.plugin", "-p", "no:cacheprovider", "--gpu-rows", str(results.rows)]
    plugins += ["--continue-on-collection-errors"]  # a package that a file needs may be missing
    return [sys.executable, "-m", "pytest", "-q", *plugins, "-m", "gpu", *tests]


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="first_gpu", description=__doc__.splitlines()[0])
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("call", choices=(*CALLS, "all"))
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540, help="of each call (540)")
    parser.add_argument("--processes", type=int, default=max(1, min(12, processors - 2)))
    parser.add_argument("--tests", nargs="+", default=(), help="files (all)")
    return parser.parse_args()


def main() -> int:
    """Make the calls; return 0 if all tests passed, 2 where nothing can run."""
    asked, started = options(), time.time()
    paths = [str(ROOT / "tools"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    setup = Results(asked.results, "setup")
    setup.run([sys.executable, "setup.py", "build_ext", "--inplace"], asked.seconds)
    facts = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], cwd=ROOT, capture_output=True, text=True
    )
    if facts.returncode:
        setup.report(f"fusedops cannot be imported: {facts.stderr.strip()[-2000:]}")
        return 2
    machine = json.loads(facts.stdout.splitlines()[-1])
    setup.report(f"{machine}; built in {time.time() - started:.0f} s")
    if machine["gpu"] is None:
        setup.report("torch sees no GPU here: nothing is run")
        return 2
    for call in CALLS if asked.call == "all" else (asked.call,):
        if call == "figures" and machine["missing"]:
            setup.report(f"nothing is measured without the libraries: {machine['missing']}")
            return 2
        results, began = Results(asked.results, call), time.time()
        try:
            {"test": test, "sanitize": sanitize, "figures": figures}[call](
                asked, results, began + asked.seconds
            )
        finally:
            (asked.results / "summary.md").write_text(summary(asked.results))
        results.report(f"{call}: {time.time() - began:.0f} s")
    print(summary(asked.results))
    rows = [row for call in CALLS for row in read(asked.results / f"{call}.jsonl")]
    return int(any(row["outcome"] in ("failed", "crashed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
