"""What calibration found, on file: ``patch(model, example=batch, calibrate="FILE.json")``.

Every process that reads the file makes the same choices and measures only what is not in it, so
that runs on one machine compute the same bits. Entries hold for a device architecture, as those of
a tuning table do (docs/tuning.md), and for one minor version of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fusedops.integrations.hf.calibration.calibrate import CalibrationFinding
from fusedops.terminal import files

_KIND, SCHEMA = "calibration", 2
_TORCH = ".".join(torch.__version__.split(".")[:2])


def read(path: str | os.PathLike[str]) -> dict[str, CalibrationFinding]:
    """Return the findings of a file by key; none where it does not exist yet.

    Those of another minor version of torch are left out: its own kernels are one side of each.

    Raises:
        ValueError: it is no file of this kind and schema.
        OSError: it cannot be read, or its folder does not exist.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"patch: calibrate must name a file in a folder that exists, got {os.fspath(path)}; "
            f"make the folder {folder} first"
        )
    if not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if (data["kind"], data["schema"]) != (_KIND, SCHEMA):
            raise KeyError(f"schema {SCHEMA} of {_KIND}")
        findings = {
            str(entry["key"]): CalibrationFinding(
                float(entry["speed_up"]), bool(entry["sure"]), str(entry["where"])
            )
            for entry in data["entries"]
        }
        return findings if data["torch"] == _TORCH else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"patch: calibrate must name a file that calibration has written or may write, "
            f"got {os.fspath(path)} ({type(error).__name__}: {error})"
        ) from None


def write(path: str | os.PathLike[str], findings: Mapping[str, CalibrationFinding]) -> None:
    """Write what was measured, all or nothing: sorted, a line per entry, for readable diffs.

    Raises:
        OSError: it cannot be written; the file is then as it was.
    """
    rows = [
        json.dumps(
            {"key": key, "speed_up": entry.speed_up, "sure": entry.sure, "where": entry.where}
        )
        for key, entry in sorted(findings.items())
        if entry.speed_up is not None
    ]
    head = f'{{\n "kind": "{_KIND}",\n "schema": {SCHEMA},\n "torch": "{_TORCH}",\n "entries": ['
    try:
        files.write_text(path, head + ",".join(f"\n  {row}" for row in rows) + "\n ]\n}\n")
    except files.UserError as error:
        raise OSError(f"patch: {error}") from None
