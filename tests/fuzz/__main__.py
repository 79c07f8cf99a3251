"""The command line of the fuzzers.

python -m tests.fuzz operators --calls 100000 --seed 1 --processes 2
python -m tests.fuzz operators --seed 1 --first 4711 --calls 1    # one call again
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import engine
from .calls import Arguments, Functions, Operators

FUZZERS = {each.name: each for each in (Operators, Functions, Arguments)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("fuzzer", choices=FUZZERS)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: of the clock")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", help="part of an op's name")
    given = vars(parser.parse_args())
    fuzzer = FUZZERS[given.pop("fuzzer")](given.pop("only"))
    report = engine.run(fuzzer, folder=Path("out/fuzz"), **given)
    for finding in report.findings[:3]:
        print(f"--- {finding}")
    print(report)
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
