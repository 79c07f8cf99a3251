"""Installs the wheels into clean environments, one per Python and torch, and tries them there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from release import distributions
from release.distributions import ReleaseError

SMOKE = Path(__file__).with_name("smoke.py")
Pair = tuple[str, str]  # torch, Python
_IMPORTS = 3  # of which the fastest counts: other processes disturb


def pairs(torches: Sequence[str], pythons: Sequence[str], *, cross: bool) -> list[Pair]:
    """Return the torches and Pythons to try together; those of one torch follow each other.

    Args:
        torches: versions.
        pythons: versions or paths.
        cross: every torch with one Python, and every Python with one torch, instead of all.
    """
    middle = (torches[len(torches) // 2], pythons[min(1, len(pythons) - 1)])
    every = [(torch, python) for torch in torches for python in pythons]
    if not cross:
        return every
    return [pair for pair in every if pair[0] == middle[0] or pair[1] == middle[1]]


def try_all(tools: Path, dist: Path, pairs: Iterable[Pair], work: Path) -> list[dict[str, Any]]:
    """Return a row per pair with what passed; the environments are removed again."""
    binary, pure, _ = distributions.files(dist)
    rows, last = [], ""
    for torch, python in pairs:
        if torch != last:  # a torch with its libraries is 5 GB
            shutil.rmtree(work / "uv", ignore_errors=True)
            last = torch
        program = interpreter(python)
        row: dict[str, Any] = {"asked_torch": torch, "asked_python": python, "passed": True}
        rows.append(row)
        if program is None:
            row["left_out"] = "no such Python on this machine"
            continue
        print(f"torch {torch}, Python {python}", end=": ", flush=True)
        started = time.monotonic()
        try:
            row |= _try_one(tools, program, torch, binary, pure, work)
        except ReleaseError as error:
            message = str(error)
            unavailable = "No solution found" in message or "no wheels with a matching" in message
            row["left_out" if unavailable else "error"] = message
            row["passed"] = unavailable
        outcome = row.get("error") or row.get("left_out") or "passed"
        print(f"{outcome.splitlines()[0]}, {time.monotonic() - started:.0f} s", flush=True)
    shutil.rmtree(work / "uv", ignore_errors=True)
    return rows


def interpreter(python: str) -> Path | None:
    """Return the program of a Python given by version or path, or ``None``."""
    if "/" in python:
        return Path(python)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in sorted(pyenv.glob(f"{python}.*/bin/python")):
        return path
    program = shutil.which(f"python{python}")
    return Path(program) if program else None


def _try_one(
    tools: Path, program: Path, torch: str, binary: Path, pure: Path, work: Path
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=work) as folder:
        environment = Path(folder) / "environment"
        python = environment / "bin" / "python"
        cache = {**os.environ, "UV_CACHE_DIR": str(work / "uv")}
        uv = tools / "uv"
        distributions.run([uv, "venv", "--quiet", "--python", program, environment], env=cache)
        install = [uv, "pip", "install", "--quiet", "--python", python]
        distributions.run([*install, f"torch=={torch}"], env=cache)
        distributions.run([*install, "--compile-bytecode", binary], env=cache)
        # A clean environment: nothing of the checkout, of other packages or of settings.
        bare = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
        run = {"cwd": folder, "env": bare}
        results = [
            _smoke(distributions.run([python, SMOKE, "cpp"], **run)) for _ in range(_IMPORTS)
        ]
        row = min(results, key=lambda result: result["fusedops_s"])
        doctor = subprocess.run(
            [python, "-m", "fusedops", "doctor", "--device", "cpu"],
            capture_output=True,
            text=True,
            cwd=folder,
            env=bare,
        )
        if doctor.returncode:
            raise ReleaseError(f"doctor failed:\n{doctor.stdout[-2000:]}{doctor.stderr[-2000:]}")
        row["doctor"] = "passed"
        distributions.run(
            [*install, "--reinstall-package", "fusedops", "--no-deps", pure], env=cache
        )
        printed = distributions.run([python, SMOKE, "torch"], **run)
        lines = [line for line in printed.splitlines() if line.startswith("fusedops ")]
        if len(lines) != 1:
            raise ReleaseError(f"the wheel without libraries printed {len(lines)} lines about it")
        row["without_library"] = lines[0]
        return row


def _smoke(printed: str) -> dict[str, Any]:
    """Return the row that the smoke test printed; torch alone may warn that numpy is missing."""
    lines = printed.strip().splitlines()
    if any(line.startswith("fusedops ") for line in lines):
        raise ReleaseError(f"the import printed a line:\n{printed}")
    return dict(json.loads(lines[-1]))
