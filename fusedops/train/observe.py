"""Records where the time of each step is spent on each rank, and tells what makes the run slow."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import torch

from fusedops.launch.processes import Ranks
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.profiler import RunShape, RunWatch, StepRecorder
from fusedops.train.config import Config
from fusedops.train.data import TokenBatch

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
        watch = RunWatch(config.out, shape) if ranks.rank == 0 else None
        if watch is not None:
            resources.callback(watch.close)
        handler = None if watch is None else watch.look
        with StepRecorder(shape, groups=names, every=every, handler=handler) as recorder:
            yield recorder


def token_pairs(batch: TokenBatch) -> float:
    """Return how many pairs of tokens causal attention compares in sequences and documents."""
    rows, length = batch.tokens.shape
    if batch.documents is None:
        return rows * length * (length + 1) / 2
    numbers = batch.documents + torch.arange(rows)[:, None] * (length + 1)
    lengths = torch.bincount(numbers.flatten()).double()
    return float((lengths * (lengths + 1) / 2).sum())
