"""Run every check of one op, and fail if a check fails or selects nothing.

    python tools/check_op.py scale_add            # all checks, cheapest first
    python tools/check_op.py scale_add --keep     # go on after a failure

docs/adding_an_op.md explains the checks. The complete tests are ``make test`` and ``make test-ci``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NOTHING_SELECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Check:
    """A command that looks at one op."""

    title: str
    command: tuple[str, ...]  # arguments of Python
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> str:
        """Run the command; return what is wrong, or an empty text."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        code = subprocess.run([sys.executable, *self.command], cwd=ROOT, env=environment).returncode
        if code == _NOTHING_SELECTED and "pytest" in self.command:
            return "no test was selected: is the op's spec, kernel or table entry missing?"
        return f"exit code {code}" if code else ""


def checks_of(op: str) -> list[Check]:
    """Return the checks of an op, in the order in which its parts are written."""

    def tests(title: str, *words: str, **environment: str) -> Check:
        return Check(title, ("-m", "pytest", "-q", *words), environment)

    usual = "not slow and not gpu and not interpreter"
    checks = [
        Check("native build", ("tools/native.py", "build")),
        tests(
            "every op has its parts", "tests/core/test_library.py", "tests/core/test_public_api.py"
        ),
        tests("values, gradients, fakes, bad inputs", "tests/ops", "-m", usual, "-k", op),
        tests("sharding rules", "tests/ops/test_sharding_rules.py", "-k", op),
        Check(
            "wrong calls of the operator",
            ("-m", "tests.fuzz", "operators", "--only", op, "--seed", "0"),
        ),
    ]
    if (ROOT / f"fusedops/kernels/{op}.py").exists():
        checks += [
            tests(
                "Triton kernels in the interpreter",
                *("tests/ops", "-m", "interpreter", "-k", op),
                TRITON_INTERPRET="1",
            ),
            tests("launches", "tests/ops/test_launches.py", "-k", op),
            tests("a hot call per compiled kernel", "tests/ops/test_hot_coverage.py"),
            Check(
                "registers and spills (writes docs/reports/triton_kernels.csv)",
                ("tools/kernel_report.py", "--op", op),
            ),
        ]
    return checks


def main(arguments: list[str] | None = None) -> None:
    """Run the checks; exit with 1 and the list of failures if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("op", help="name of the op: scale_add")
    parser.add_argument("--keep", action="store_true", help="go on after a failure")
    options = parser.parse_args(arguments)
    if not (ROOT / f"fusedops/ops/{options.op}.py").exists():
        parser.error(f"there is no fusedops/ops/{options.op}.py: tools/new_op.py writes one")
    failures = []
    for check in checks_of(options.op):
        print(f"== {check.title}: python {' '.join(check.command)}", flush=True)
        problem = check.run()
        if problem:
            failures.append(f"{check.title}: {problem}")
            if not options.keep:
                break
    for failure in failures:
        print(f"FAILED {failure}")
    if failures:
        raise SystemExit(1)
    print(f"all checks of {options.op} passed")


if __name__ == "__main__":
    main()
