"""Records where the time and the memory of steps go on each rank, and what makes the run slow."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fusedops.launch.processes import Ranks
from fusedops.memory import StepMemory
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.profiler import RunShape, RunWatch, StepRecorder
from fusedops.profiler.timings import memory_file
from fusedops.train.config import Config
from fusedops.train.data import TokenBatch

_log = logging.getLogger(__name__)

# Entries of the allocator's history, of about 300 bytes with their stacks.
_HISTORY = 200_000
# Names of the mesh's dimensions by the kind of parallelism.
_GROUPS = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": "data"}


def make_recorder(
    config: Config, parallel: TrainEngine, ranks: Ranks, resources: contextlib.ExitStack
) -> StepRecorder | None:
    """Make the recorder of a run; ``None`` if ``log.timings`` is 0. All ranks call this together.

    The first rank writes the rows of all ranks, and a warning and a line of ``findings.jsonl`` for
    each finding. ``resources`` closes both.
    """
    every = config.log.timings
    if not every:
        return None
    shape = RunShape(asdict(parallel.config.sizes), device=ranks.device.type)
    mesh = parallel.mesh
    names = {} if mesh is None else {kind: mesh.group(n).group_name for kind, n in _GROUPS.items()}
    handler = None
    if ranks.rank == 0:
        watch = RunWatch(config.out, shape)
        resources.callback(watch.close)
        handler = watch.look
    recorder = StepRecorder(shape, groups=names, every=every, handler=handler)
    return resources.enter_context(recorder)


def token_pairs(batch: TokenBatch) -> float:
    """Return how many pairs of tokens causal attention compares in sequences and documents."""
    rows, length = batch.tokens.shape
    if batch.documents is None:
        return rows * length * (length + 1) / 2
    numbers = batch.documents + torch.arange(rows)[:, None] * (length + 1)
    lengths = torch.bincount(numbers.flatten()).double()
    return float((lengths * (lengths + 1) / 2).sum())


class MemoryRecording:
    """Writes what a rank allocates in one step to ``profile/memory-<rank>.json`` of a run.

    Args:
        out: folder of the run.
        step: the first that may be recorded; the one before it is used to find the layers. 0: none.
        rank: of this process.
        memory: of the model.
    """

    def __init__(self, out: str | Path, step: int, rank: int, memory: StepMemory) -> None:
        self._path, self._rank = memory_file(out, rank), rank
        self._from, self._memory, self._prepared = step, memory, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the forward and backward of a step if its turn has come."""
        if not self._from or self._memory.report is not None or number < self._from - 1:
            yield
        elif not self._prepared:
            with self._memory.prepare():
                yield
            self._prepared = True
        else:
            with self._memory.record():
                yield
            self._write(number)

    def _write(self, number: int) -> None:
        assert self._memory.report is not None
        record = {"step": number, "rank": self._rank} | self._memory.report.record()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(record))
        except OSError as error:
            _log.warning("cannot write %s: %s; training continues", self._path, error.strerror)


@contextlib.contextmanager
def snapshot_when_exhausted(out: str | Path, ranks: Ranks) -> Iterator[None]:
    """Write CUDA's memory snapshot to the run's folder when a GPU's memory is exhausted.

    The file is read by https://pytorch.org/memory_viz.
    """
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
    try:
        yield
    except torch.OutOfMemoryError:
        path = Path(out) / f"memory-snapshot-{ranks.rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        _log.error("the memory snapshot is %s: open it at https://pytorch.org/memory_viz", path)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
