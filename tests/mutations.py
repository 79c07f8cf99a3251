"""Plants the faults of ``mutations.toml``, one at a time, and runs the tests that must find them.

    python tests/mutations.py             # all
    python tests/mutations.py TEXT ...    # those whose name or file contains one of the texts
    python tests/mutations.py --check     # only run their tests in an unmodified copy of the tree

Each fault is planted in a copy of the tree, which shares its compiled library. One that ends in an
error of the collection or of an import is an invalid entry, and not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
# What pytest selects, by the ``mark`` of an entry; an entry without a mark has the first tier.
_SELECTIONS = {
    "": "not ci and not slow and not gpu and not interpreter",
    "ci": "not slow and not gpu and not interpreter",
    "interpreter": "interpreter and not slow",
    "slow": "not gpu and not interpreter",
}
_SECONDS, _CHECK_SECONDS = 300, 3600
_FAILURE = re.compile(r"^(FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_NO_IMPORT = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")


@dataclass(frozen=True)
class Mutation:
    """A fault: what breaks, the change of a file, and the tests that must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    mark: str = ""

    def mistake(self) -> str | None:
        """Return why the entry does not fit the tree; ``None`` if it does."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        if (count := path.read_text().count(self.old)) != 1:
            return f"old occurs {count} times in {self.file}"
        if self.old == self.new:
            return "new is the same as old"
        if self.mark not in _SELECTIONS:
            return f"mark must be one of {sorted(filter(None, _SELECTIONS))}, got {self.mark!r}"
        missing = [test for test in self.tests if not _exists(test)]
        return f"{missing} do not exist" if missing or not self.tests else None


def _exists(test: str) -> bool:
    """Return whether there is a file of tests, and the function in it that is named, if one is."""
    file, _, function = test.partition("::")
    path, name = ROOT / file, re.escape(function.partition("[")[0])
    return path.is_file() and bool(re.search(rf"^def {name}\b", path.read_text(), re.MULTILINE))


def mutations() -> list[Mutation]:
    """Return the entries of the list, in its order."""
    entries = tomllib.loads(LIST.read_text())["mutation"]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def _snapshot() -> Iterator[Path]:
    """Copy the files of the tree: whatever a test writes, the tree stays as it is."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        (tree / "fusedops" / "lib").symlink_to(ROOT / "fusedops" / "lib")
        yield tree


@contextmanager
def _planted(tree: Path, mutation: Mutation) -> Iterator[None]:
    """Change a file of the snapshot, and restore it."""
    path = tree / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        shutil.copy2(ROOT / mutation.file, path)


def _pytest(tree: Path, mark: str, tests: Sequence[str], seconds: int) -> tuple[int | None, str]:
    """Run tests in a copy until one fails; return the exit status, ``None`` if time is up."""
    options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", _SELECTIONS[mark]]
    variables = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "400"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # each file is compiled once
    if mark == "interpreter":
        variables["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        output.seek(0)
        return status, output.read()


def _verdict(status: int | None, output: str) -> tuple[bool, str]:
    """Return whether a fault was found, and what to print: by which test, or why not."""
    failure = _FAILURE.search(output)
    if status == 0:
        return False, "NOT FOUND"
    if status is None:
        return False, f"ERROR: the tests did not end within {_SECONDS} s"
    if status != 1 or failure is None:
        return False, f"ERROR: pytest ended with status {status}\n{output[-2000:]}"
    _, test, reason = failure.groups()
    if "::" not in test or (reason or "").startswith(_NO_IMPORT):
        return False, f"ERROR: the copy cannot be imported: {test} - {reason}"
    return True, f"found by {test}"


def _passes(snapshot: Path, chosen: Sequence[Mutation]) -> bool:
    """Run the tests of all entries without a fault; print what fails."""
    passes = True
    for mark in _SELECTIONS:
        lists = [mutation.tests for mutation in chosen if mutation.mark == mark]
        if tests := list(dict.fromkeys(test for names in lists for test in names)):
            status, output = _pytest(snapshot, mark, tests, _CHECK_SECONDS)
            print(f"without a fault: {output.strip().splitlines()[-1]}", flush=True)
            if status != 0:
                passes = False
                print(output[-4000:])
    return passes


def _run(snapshot: Path, mutation: Mutation) -> bool:
    """Plant a fault, print by which test it was found or why not, and return whether it was."""
    begin, mistake = time.monotonic(), mutation.mistake()
    if mistake is None:
        with _planted(snapshot, mutation):
            found, text = _verdict(*_pytest(snapshot, mutation.mark, mutation.tests, _SECONDS))
    else:
        found, text = False, f"ERROR: {mistake}"
    print(f"{mutation.name} ({time.monotonic() - begin:.0f} s)\n    {text}", flush=True)
    return found


def main() -> int:
    """Run the command; return 1 if a fault was not found or an entry is invalid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--check", action="store_true", help="only without a fault")
    given = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if not given.texts or any(text in mutation.name + mutation.file for text in given.texts)
    ]
    if not chosen:
        parser.error("no entry has one of these texts in its name or file")
    with _snapshot() as snapshot:
        if not _passes(snapshot, chosen):
            print("the tests fail without a fault")
            return 1
        if given.check:
            return 0
        count = sum(_run(snapshot, mutation) for mutation in chosen)
    print(f"{count} of {len(chosen)} found")
    return int(count < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
