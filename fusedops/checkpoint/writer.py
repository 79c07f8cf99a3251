"""Writing one checkpoint: the files of all ranks, their fingerprints and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import rank_file, reasons, tensors
from fusedops.checkpoint.ranks import Ranks

_METADATA = ".metadata"  # of torch's checkpoint; the first rank writes it


@dataclass(frozen=True)
class Snapshot:
    """What a rank writes of a checkpoint."""

    step: int
    content: dict[str, Any]  # the tensors of all ranks
    rank_file: bytes


def write(snapshot: Snapshot, partial: Path, final: Path, ranks: Ranks) -> str | None:
    """Write a checkpoint on all ranks; return why it could not be written, the same on all.

    Args:
        snapshot: what this rank writes.
        partial: the folder that is written into.
        final: what it is called when it is complete.
        ranks: that write together.
    """

    def write_files() -> None:
        tensors.write(snapshot.content, partial, ranks.group)
        folders.write(partial / rank_file.name_of(ranks.rank), snapshot.rank_file)

    problem = ranks.agree(reasons.attempt(write_files)) or _commit(snapshot, partial, final, ranks)
    if problem is not None and ranks.rank == 0:
        folders.discard(partial)
    return problem


def _commit(snapshot: Snapshot, partial: Path, final: Path, ranks: Ranks) -> str | None:
    """Take the fingerprints, each rank of what it wrote, and make the checkpoint visible."""
    own: dict[str, dict[str, Any]] = {}

    def take_fingerprints() -> None:
        names = [path.name for path in partial.glob(f"__{ranks.rank}_*")]
        names += [_METADATA] if ranks.rank == 0 else []
        names.append(rank_file.name_of(ranks.rank))
        own.update(folders.fingerprints(partial, names))

    problem = ranks.agree(reasons.attempt(take_fingerprints))
    gathered = ranks.gather(own)
    if problem is None and ranks.rank == 0:
        files = {name: entry for entries in gathered for name, entry in entries.items()}
        record = {
            "schema": folders.SCHEMA,
            "step": snapshot.step,
            "ranks": ranks.size,
            "torch": torch.__version__,
            "files": files,
        }
        unknown = {path.name for path in partial.glob("*.distcp")} - files.keys()
        if unknown:
            problem = f"no rank has fingerprinted {', '.join(sorted(unknown))}"
        else:
            problem = reasons.attempt(lambda: folders.commit(partial, final, record))
    return ranks.agree(problem)
