"""Times CPU peers of fusedops by turns with the same number of threads, and records a table.

    python -m venv build/peers
    build/peers/bin/pip install -r bench/cpu_peers/requirements.txt
    PYTHONPATH=. build/peers/bin/python bench/cpu_peers/measure.py --kinds loss,encoders --record

Each contest replaces its rows of ``bench/results/<machine>/peers.json`` when it is done: a run that
was interrupted or disturbed goes on with ``--missing``. Weights are random, nothing is downloaded.
Before anything is timed, the outputs of each way are compared with the same computation in float64
(decoders and LoRA: float32).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import ways

from fusedops.bench import machine
from fusedops.runtime.timer import Timing
from fusedops.terminal import files

HERE = Path(__file__).resolve().parent
SAMPLE = 0.15  # seconds of a sample, several calls if they are short
PAUSE = 0.02  # seconds between two ways: threads of the one before stop to spin
LEAST, MOST = 5, 25  # rounds
CLEAN = 3  # samples of each way that nothing else disturbs: it takes up to three times as long

Json = dict[str, Any]


class Workers:
    """The processes, each started when a way needs it."""

    def __init__(self, threads: int) -> None:
        self.threads, self.processes = threads, dict[str, subprocess.Popen[str]]()

    def ask(self, process: str, **request: Any) -> Json:
        """Send one request and return the answer; a process that died says so as a reason."""
        worker = self.processes.get(process)
        if worker is None or worker.poll() is not None:
            worker = self.processes[process] = self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"reason": f"its process ended with exit code {worker.wait()}"}
        answer: Json = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        count = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | dict.fromkeys(names, count) | {"PYTHONPATH": path}
        command = [sys.executable, str(HERE / "worker.py")]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def forget(self) -> None:
        """Free the ways of a contest in all processes."""
        for process in self.processes:
            self.ask(process, forget=True)

    def close(self) -> None:
        """End all processes."""
        for worker in self.processes.values():
            if worker.stdin is not None:
                worker.stdin.close()
            worker.wait()


def run_contest(workers: Workers, kind: str, number: int, seconds: float) -> list[Json]:
    """Make the ways of a contest, compare their outputs, time them by turns; return the rows."""
    contest = ways.contests(kind)[number]
    rows, made = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "outputs")
        reason = workers.ask(ways.OWN_PROCESS, reference=[kind, number], to=path).get("reason")
        if reason is not None:
            raise files.UserError(f"the reference of {contest.work} failed: {reason}")
        reference = torch.load(path)
        for name, way in contest.ways.items():
            row = {"work": contest.work, "contest": contest.dtype, "tokens": contest.tokens}
            row |= {"way": name, "dtype": way.dtype or contest.dtype}
            row["ours"] = way.against or contest.ours
            rows.append(row)
            row |= workers.ask(way.process, make=[kind, number, name], to=path)
            if "reason" not in row:
                row["difference"] = ways.difference(torch.load(path), reference)
                made.append(name)
    timing = take_turns(workers, contest, made, seconds)
    for row in rows:
        if "reason" in row or row["way"] not in timing.rounds:
            row.setdefault("reason", "it failed while it was timed")
            continue
        spread = timing.spread(row["way"])
        row |= {"seconds": asdict(spread), "undisturbed": timing.trusted(row["way"])}
        if row["ours"] in timing.rounds:
            row["ratio"] = asdict(timing.ratio(row["way"], row["ours"]))
    workers.forget()
    return rows


def take_turns(workers: Workers, contest: ways.Contest, names: list[str], seconds: float) -> Timing:
    """Take a sample of each way per round, in random order, for about ``seconds``."""
    timing = Timing({name: [] for name in names}, {name: [] for name in names}, CLEAN)
    start, rounds = time.perf_counter(), 0
    while names and rounds < MOST:
        limit = seconds if all(timing.trusted(name) for name in names) else 3 * seconds
        if rounds >= LEAST and time.perf_counter() - start > limit:
            break
        rounds += 1
        for name in random.sample(names, len(names)):
            time.sleep(PAUSE)
            answer = workers.ask(contest.ways[name].process, time=name, seconds=SAMPLE)
            if "reason" in answer:
                names = [each for each in names if each != name]
                del timing.rounds[name], timing.contended[name]
                continue
            timing.rounds[name].append(answer["seconds"])
            timing.contended[name].append(answer["disturbed"])
    return timing


def describe(row: Json) -> str:
    """Return a row as a line of text."""
    start = f"{row['work']}, {row['dtype']}, {row['way']}: "
    if "reason" in row:
        return start + row["reason"]
    ratio = f", {row['ratio']['median']:.2f} times ours" if "ratio" in row else ""
    busy = "" if row["undisturbed"] else " (disturbed)"
    return (
        f"{start}{row['seconds']['median'] * 1e3:.3f} ms{ratio}{busy}, difference "
        f"{row['difference']:.1e}"
    )


def merged(record: Json, kind: str, part: Json) -> Json:
    """Return a record with the contests of a part in the place of their earlier rows."""
    kinds = dict(record.get("kinds", {}))
    measured = {contest_of(row) for row in part["rows"]}
    before = kinds.get(kind, {"rows": []})["rows"]
    kept = [row for row in before if contest_of(row) not in measured]
    kinds[kind] = part | {"rows": kept + part["rows"]}
    return {"kinds": {name: kinds[name] for name in ways.KINDS if name in kinds}}


def contest_of(row: Json) -> tuple[str, str]:
    """Return what tells the contests of a kind apart."""
    return row["work"], row["contest"]


def quiet(rows: list[Json]) -> set[tuple[str, str]]:
    """Return the contests that nothing else on the machine disturbed."""
    disturbed = {contest_of(row) for row in rows if not row.get("undisturbed", True)}
    return {contest_of(row) for row in rows} - disturbed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each row, and write the JSON after each contest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", default=",".join(ways.KINDS), help="comma-separated")
    parser.add_argument("--only", default="", help="contests whose work or dtype contains it")
    parser.add_argument("--missing", action="store_true", help="all without undisturbed rows")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long per contest")
    parser.add_argument("--threads", type=int, default=2, help="of each way")
    parser.add_argument("--out", type=Path, default=Path("out"), help="output directory")
    parser.add_argument("--record", action="store_true", help="keep it in bench/results/<device>")
    options = parser.parse_args(arguments)
    with files.one_line_errors():
        kinds = options.kinds.split(",")
        if unknown := set(kinds) - set(ways.KINDS):
            raise files.UserError(f"--kinds must be of {', '.join(ways.KINDS)}, got {unknown}")
        torch.set_num_threads(options.threads)
        device = torch.device("cpu")
        folder = options.out
        if options.record:
            folder = HERE.parent / "results" / machine.machine(device).slug
        target = files.make_folder(folder) / "peers.json"
        workers = Workers(options.threads)
        try:
            for kind in kinds:
                record = files.read_json(target) if target.exists() else {}
                rows = record.get("kinds", {}).get(kind, {"rows": []})["rows"]
                done = quiet(rows) if options.missing else set()
                for number, contest in enumerate(ways.contests(kind)):
                    key = contest.work, contest.dtype
                    if options.only not in ", ".join(key) or key in done:
                        continue
                    rows = run_contest(workers, kind, number, options.seconds)
                    print("\n".join(describe(row) for row in rows), flush=True)
                    part = machine.provenance(device) | {"rows": rows}
                    record = merged(record, kind, part)
                    files.write_json(target, record)
        finally:
            workers.close()
    print(f"wrote {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
