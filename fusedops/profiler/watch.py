"""Writes the rows of all ranks of a run, and says what makes it slow while it runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from fusedops.profiler.detection import Detector
from fusedops.profiler.timings import RunShape, TimingsWriter

FINDINGS = "findings.jsonl"
_log = logging.getLogger("fusedops")


class RunWatch:
    """The handler of a ``StepRecorder`` that keeps the records of a run in its folder.

    Each finding is a warning of the logger ``fusedops`` (a small deviation is logged at level INFO)
    and a line of ``findings.jsonl``. If the disk is full, one warning is logged, and
    training continues without records.

    Args:
        folder: of the run.
        shape: of the run.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from fusedops.profiler import RunShape, RunWatch, read_timings
        >>> from fusedops.profiler.timings import FIELDS
        >>> folder = tempfile.mkdtemp()
        >>> watch = RunWatch(folder, RunShape(dict(pp=1, dp=1, cp=1, tp=1, ep=1)))
        >>> watch.look(1, torch.zeros(1, len(FIELDS)))
        >>> watch.close()
        >>> read_timings(folder).steps
        [1]
    """

    def __init__(self, folder: str | Path, shape: RunShape) -> None:
        self._findings = Path(folder) / FINDINGS
        self._detector = Detector(shape)
        self._writer: TimingsWriter | None = None
        try:
            self._writer = TimingsWriter(Path(folder), shape)
        except OSError as error:
            self._warn(error)

    def look(self, step: int, rows: torch.Tensor) -> None:
        """Write the rows of a step, ``[ranks, fields]``, and report what they show.

        Args:
            step: its number.
            rows: float32.
        """
        findings = self._detector.update(step, rows)
        for finding in findings:
            (_log.warning if finding.severe else _log.info)("step %d: %s", step, finding)
        if self._writer is None:
            return
        try:
            self._writer.write(step, rows)
            if findings:
                with self._findings.open("a") as file:
                    file.writelines(json.dumps(finding.record()) + "\n" for finding in findings)
        except OSError as error:
            self._warn(error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _warn(self, error: OSError) -> None:
        why = error.strerror or error
        _log.warning("cannot write %s: %s; training continues without it", error.filename, why)
