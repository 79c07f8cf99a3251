"""``make first-gpu``: the calls, from the command line.

    python -m first_gpu CALL RESULTS      CALL: test, figures or all

RESULTS gets a log and an archive per call and ``summary.md``. What a call has done is in its
archive, whatever ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "first_gpu"
_PATHS = (str(ROOT / "tools"), str(ROOT), str(ROOT / "tests" / "ops"))
for _path in _PATHS:
    if _path not in sys.path:
        sys.path.append(_path)

from first_gpu import stand_in  # noqa: E402 (the paths come first)
from first_gpu.calls import CALLS, Call, Settings  # noqa: E402
from first_gpu.results import Results  # noqa: E402


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def options() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(prog="first_gpu", description=__doc__.splitlines()[0])
    processors = len(os.sched_getaffinity(0))
    parser.add_argument("call", choices=(*CALLS, "all"))
    parser.add_argument("results", type=Path, help="folder for what is handed on")
    parser.add_argument("--ops", default="", help="comma-separated; default: all")
    parser.add_argument("--seconds", type=float, default=540, help="of each call (540)")
    parser.add_argument("--item-seconds", type=float, default=45, help="when a test hangs (45)")
    parser.add_argument("--slice-seconds", type=float, default=90, help="of an op in a row (90)")
    parser.add_argument("--processes", type=int, default=max(1, min(12, processors - 2)))
    parser.add_argument("--compilers", type=int, default=processors)
    parser.add_argument("--memory", type=float, default=0, help="GiB that a process may occupy")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for all files")
    parser.add_argument(
        "--rehearse",
        metavar="FILE",
        type=Path,
        help="no GPU: leave launches out, and make the errors of a JSON file: [[part of the name "
        f"of an item, kind], ...], where a kind is one of: {', '.join(stand_in.KINDS)}",
    )
    return parser.parse_args()


def main() -> int:
    """Make the calls; return 0 if none has a failure."""
    asked = options()
    signal.signal(signal.SIGTERM, _stop)
    work = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    paths = [*_PATHS, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if asked.rehearse is not None:
        import stand_in_cuda  # Triton, which only a rehearsal needs here

        os.environ["FIRST_GPU_PLANTED"] = json.dumps(stand_in.read_planted(asked.rehearse))
        os.environ["FIRST_GPU_STAND_IN"] = str(stand_in_cuda.build(work))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    settings = Settings(
        seconds=asked.seconds,
        processes=asked.processes,
        compilers=asked.compilers,
        ops=[op for op in asked.ops.split(",") if op],
        item_seconds=asked.item_seconds,
        slice_seconds=asked.slice_seconds,
        memory=asked.memory * 2**30 or max(memory / 4, memory / asked.processes),
        environment=environment,
    )
    sound = True
    for name in CALLS if asked.call == "all" else (asked.call,):
        results = Results(name, asked.results, work)
        try:
            sound &= Call(name, settings, results).run()
        except KeyboardInterrupt as stopped:
            results.step(f"stopped by {stopped or 'SIGINT'}")
            return 130
        except Exception as error:
            results.step(f"the call itself failed: {type(error).__name__}: {error}")
            sound = False
            if asked.call != "all":
                raise
        finally:
            results.pack()
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
