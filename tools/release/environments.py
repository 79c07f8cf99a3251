"""Installs the wheels into clean environments, one per Python and torch, and tries them there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from release import distributions
from release.distributions import ReleaseError

SMOKE = Path(__file__).with_name("smoke.py")
Pair = tuple[str, str]  # torch, Python
_IMPORTS = 3  # of which the fastest counts: other processes disturb


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
            if unavailable:
                row["left_out"] = "torch has no wheel for this Python"
            else:
                row["error"] = message
            row["passed"] = unavailable
        outcome = row.get("error") or row.get("left_out") or "passed"
        print(f"{outcome}, {time.monotonic() - started:.0f} s", flush=True)
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
        python = Path(folder) / "venv" / "bin" / "python"
        distributions.run([tools / "uv", "venv", "--quiet", "--python", program, folder + "/venv"])
        cache = {**os.environ, "UV_CACHE_DIR": str(work / "uv")}
        install = [tools / "uv", "pip", "install", "--quiet", "--python", python]
        distributions.run([*install, f"torch=={torch}"], env=cache)
        distributions.run([*install, "--compile-bytecode", binary], env=cache)
        # A clean environment: nothing of the checkout, of other packages or of settings.
        bare = {"PATH": "/usr/sbin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        run: dict[str, Any] = {"cwd": folder, "env": bare}
        smoke = [python, SMOKE]
        results = [_smoke(distributions.run([*smoke, "cpp"], **run)) for _ in range(_IMPORTS)]
        row = min(results, key=lambda result: result["fusedops_s"])
        command = [python, "-m", "fusedops", "doctor", "--device", "cpu"]
        distributions.run(command, **run)
        row["doctor"] = "passed"
        again = ["--reinstall-package", "fusedops", "--no-deps", pure]
        distributions.run([*install, *again], env=cache)
        printed = distributions.run([*smoke, "torch"], **run)
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
