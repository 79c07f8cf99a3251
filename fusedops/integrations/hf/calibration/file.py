"""What calibration found, on file: ``patch(model, example=batch, calibrate="FILE.json")``.

Every process that reads the file makes the same choices and measures only what is not in it, so
that runs on one machine compute the same bits. Entries hold for one device architecture and for
one minor version of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fusedops.integrations.hf.calibration.calibrate import CalibrationFinding
from fusedops.terminal import files

_KIND, SCHEMA = "calibration", 2


def read(path: str | os.PathLike[str]) -> dict[str, CalibrationFinding]:
    """Return the findings of a file by key; none where it does not exist yet.

    Raises:
        ValueError: it is no file of this kind and schema.
        OSError: it cannot be read, or its folder does not exist.
    """
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(
            f"patch: calibrate must name a file in a folder that exists, got {os.fspath(path)}"
        )
    if not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if (data["kind"], data["schema"]) != (_KIND, SCHEMA):
            raise KeyError(f"schema {SCHEMA} of {_KIND}")
        return {str(entry.pop("key")): _finding(**entry) for entry in data["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"patch: calibrate must name a file that calibration has written or may write, "
            f"got {os.fspath(path)} ({type(error).__name__}: {error})"
        ) from None


def _finding(speed_up: float, stock_wins: bool, where: str) -> CalibrationFinding:
    return CalibrationFinding(float(speed_up), stock_wins is True, str(where))


def write(path: str | os.PathLike[str], findings: Mapping[str, CalibrationFinding]) -> None:
    """Write what was measured, all or nothing.

    Raises:
        OSError: it cannot be written; the file is then as it was.
    """
    entries = [
        {
            "key": key,
            "speed_up": entry.speed_up,
            "stock_wins": entry.stock_wins,
            "where": entry.where,
        }
        for key, entry in sorted(findings.items())
        if entry.speed_up is not None
    ]
    try:
        files.write_json(path, {"kind": _KIND, "schema": SCHEMA, "entries": entries})
    except files.UserError as error:
        raise OSError(f"patch: {error}") from None
