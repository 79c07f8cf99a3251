"""Writing one checkpoint: the files of all ranks, their fingerprints and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import rank_file, tensors
from fusedops.checkpoint.ranks import CheckpointRanks

_METADATA = ".metadata"  # of torch's checkpoint; the first rank writes it


@dataclass(frozen=True)
class WriteJob:
    """What a rank writes of a checkpoint, and where."""

    step: int
    partial: Path  # the folder that is written into
    final: Path  # what it is called when it is complete
    content: dict[str, Any]  # the tensors of all ranks
    rank_file: bytes


def write(job: WriteJob, ranks: CheckpointRanks) -> str | None:
    """Write a checkpoint on all ranks; return why it could not be written, the same on all."""

    def write_files() -> None:
        tensors.write(job.content, job.partial, ranks.group)
        folders.write(job.partial / rank_file.name_of(ranks.rank), job.rank_file)

    problem = ranks.attempt(write_files) or _commit(job, ranks)
    if problem is not None and ranks.rank == 0:
        folders.discard(job.partial)
    return problem


def _commit(job: WriteJob, ranks: CheckpointRanks) -> str | None:
    """Take the fingerprints, each rank of what it wrote, and make the checkpoint visible."""
    partial = job.partial
    own: dict[str, dict[str, Any]] = {}

    def take_fingerprints() -> None:
        names = [path.name for path in partial.glob(f"__{ranks.rank}_*")]
        names += [_METADATA] if ranks.rank == 0 else []
        names.append(rank_file.name_of(ranks.rank))
        own.update(folders.fingerprints(partial, names))

    problem = ranks.attempt(take_fingerprints)
    if problem is not None:
        return problem
    gathered = ranks.gather(own)

    def make_visible() -> None:
        if ranks.rank != 0:
            return
        files = {name: entry for entries in gathered for name, entry in entries.items()}
        record = {
            "schema": folders.SCHEMA,
            "step": job.step,
            "ranks": ranks.size,
            "torch": torch.__version__,
            "files": files,
        }
        unknown = {path.name for path in partial.glob("*.distcp")} - files.keys()
        if unknown:
            raise ValueError(f"no rank has fingerprinted {', '.join(sorted(unknown))}")
        folders.commit(partial, job.final, record)

    return ranks.attempt(make_visible)
