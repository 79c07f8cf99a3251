"""``make release-check``: builds the distributions, checks them, and tries them.

    PYTHONPATH=tools python -m release build DIST      # wheels and sdist for every torch
    PYTHONPATH=tools python -m release check DIST      # auditwheel, abi3audit, twine
    PYTHONPATH=tools python -m release try DIST        # clean environments; writes the page

``all`` does the three. A run takes gigabytes of downloads and of disk (about 15 GB at a time, under
build/release), and prints what it is about to do. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from release import distributions, environments, page, torches

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "release"
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def options() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("build", "check", "try", "all"))
    parser.add_argument("dist", type=Path, help="folder of the distributions")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION")
    parser.add_argument(
        "--python",
        nargs="+",
        default=PYTHONS,
        help="versions (left out where this machine has none) or paths",
    )
    return parser.parse_args()


def main() -> int:
    """Run the command; return the exit code."""
    chosen = options()
    dist = chosen.dist.resolve()
    try:
        tools = distributions.tools(WORK)
        if chosen.command in ("build", "all"):
            folders = [torches.unpacked(tools, version, WORK) for version in chosen.torch]
            distributions.build(tools, dist, folders)
        if chosen.command in ("check", "all"):
            distributions.check(tools, dist)
        if chosen.command in ("try", "all"):
            pairs = itertools.product(chosen.torch, chosen.python)
            rows = environments.try_all(tools, dist, pairs, WORK)
            page.record(rows, distributions.describe(dist))
            return 0 if all(row["passed"] for row in rows) else 1
    except distributions.ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
