"""What calibration found, on file: ``patch(model, calibrate="FILE.json")``.

Every process that reads the file makes the same choices and measures only what is not in it, so
that runs on one machine compute the same bits. Entries hold for a device architecture, as those of
a tuning table do (docs/tuning.md), and for one minor version of torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fusedops.integrations.hf.calibration.calibrate import CalibrationFinding

SCHEMA = 1
_KIND = "calibration"


def read(path: str | os.PathLike[str]) -> dict[str, CalibrationFinding]:
    """Return the findings of a file by key; none where it does not exist yet.

    Those of another minor version of torch are left out: its own kernels are one side of each.

    Raises:
        ValueError: when it is no file of this kind and schema.
        OSError: when it cannot be read, or its folder does not exist: it could not be written.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"patch: calibrate must name a file in a folder that exists, got {os.fspath(path)}; "
            f"make the folder {folder} first"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        data = json.loads(text)
        if (data["kind"], data["schema"]) != (_KIND, SCHEMA):
            raise KeyError(f"schema {SCHEMA} of {_KIND}")
        entries = [(entry.pop("key"), CalibrationFinding(**entry)) for entry in data["entries"]]
        known = data["torch"] == _torch()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"patch: calibrate must name a file that calibration has written or may write, "
            f"got {os.fspath(path)} ({type(error).__name__}: {error})"
        ) from None
    if not all(isinstance(key, str) and _is_measured(finding) for key, finding in entries):
        raise ValueError(
            f"patch: calibrate must name a file of measurements, got {os.fspath(path)} with an "
            "entry that is none"
        )
    return dict(entries) if known else {}


def write(path: str | os.PathLike[str], findings: Mapping[str, CalibrationFinding]) -> None:
    """Write findings, all or nothing: sorted, a line per entry, so that a diff can be read.

    Raises:
        OSError: when it cannot be written; the file is as it was then.
    """
    rows = [
        json.dumps({"key": key, **asdict(finding)})
        for key, finding in sorted(findings.items())
        if _is_measured(finding)
    ]
    head: dict[str, Any] = {"kind": _KIND, "schema": SCHEMA, "torch": _torch()}
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": ['
    text += ",".join(f"\n  {row}" for row in rows) + ("\n ]" if rows else "]") + "\n}\n"
    target = Path(os.path.realpath(path))
    handle, aside = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def _is_measured(finding: CalibrationFinding) -> bool:
    speed_up = finding.speed_up
    return isinstance(speed_up, (int, float)) and speed_up > 0 and not finding.problem


def _torch() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])
