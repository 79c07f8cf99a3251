"""Records where the time of each step goes on each rank, and tells what makes the run slow."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from fusedops.launch.processes import Ranks
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.profiler import Detector, RunShape, StepRecorder, TimingsWriter
from fusedops.train.config import Config
from fusedops.train.data import TokenBatch

FINDINGS = "findings.jsonl"
_log = logging.getLogger(__name__)
# Names of the mesh's dimensions by the kind of parallelism.
_GROUPS = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": "data"}


@contextlib.contextmanager
def recording(config: Config, parallel: TrainEngine, ranks: Ranks) -> Iterator[StepRecorder | None]:
    """Make the recorder of a run; ``None`` if ``log.timings`` is 0. All ranks call this together.

    The first rank writes the rows of all ranks, and a warning and a line of ``findings.jsonl`` for
    each finding.
    """
    every = config.log.timings
    if not every:
        yield None
        return
    layout = parallel.config
    shape = RunShape(
        {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep")},
        device=ranks.device.type,
        hosts=tuple(ranks.gathered(socket.gethostname())),
        tokens=config.batch * config.data.seq_len,
    )
    mesh = parallel.mesh
    names = {} if mesh is None else {kind: mesh.group(n).group_name for kind, n in _GROUPS.items()}
    with contextlib.ExitStack() as resources:
        watch = _Watch(Path(config.out), shape) if ranks.rank == 0 else None
        if watch is not None:
            resources.callback(watch.close)
        handler = None if watch is None else watch.look
        with StepRecorder(shape, groups=names, every=every, handler=handler) as recorder:
            yield recorder


class _Watch:
    """Writes the rows of all ranks of a run, and what they show."""

    def __init__(self, folder: Path, shape: RunShape) -> None:
        self._findings = folder / FINDINGS
        self._detector, self._writer = Detector(shape), None
        with contextlib.suppress(OSError):
            self._writer = TimingsWriter(folder, shape)

    def look(self, step: int, rows: torch.Tensor) -> None:
        """Write a step, and report what it shows for the first time."""
        found = self._detector.update(step, rows)
        for finding in found:
            (_log.warning if finding.severe else _log.info)("step %d: %s", step, finding)
        try:
            if self._writer is not None:
                self._writer.write(step, rows)
            if found:
                with self._findings.open("a") as file:
                    file.writelines(json.dumps(f.record()) + "\n" for f in found)
        except OSError as error:
            _log.warning("cannot write timings: %s; training continues", error.strerror or error)
            self._writer = None

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def token_pairs(batch: TokenBatch) -> float:
    """Return how many pairs of tokens causal attention compares in sequences and documents."""
    rows, length = batch.tokens.shape
    if batch.documents is None:
        return rows * length * (length + 1) / 2
    numbers = batch.documents + torch.arange(rows)[:, None] * (length + 1)
    lengths = torch.bincount(numbers.flatten()).double()
    return float((lengths * (lengths + 1) / 2).sum())
