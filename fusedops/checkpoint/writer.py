"""Writing one checkpoint: the files of all ranks, their fingerprints and the manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import rank_file, tensors
from fusedops.checkpoint.ranks import CheckpointRanks

_METADATA = ".metadata"  # of torch's checkpoint; the first rank writes it


def write(
    folder: Path, content: dict[str, Any], own_file: bytes, ranks: CheckpointRanks
) -> str | None:
    """Write the checkpoint ``folder`` on all ranks, which ``folders.begin`` began.

    Args:
        folder: which exists as soon as it is complete.
        content: the tensors of all ranks.
        own_file: of this rank.
        ranks: that write together.

    Returns:
        Why it could not be written, the same on all ranks; else ``None``.
    """
    partial = folders.partial(folder)

    def write_files() -> dict[str, dict[str, Any]]:
        """Return the fingerprints of what this rank wrote."""
        tensors.write(content, partial, ranks.group)
        names = [rank_file.name_of(ranks.rank)]
        folders.write(partial / names[0], own_file)
        names += [path.name for path in partial.glob(f"__{ranks.rank}_*")]
        names += [_METADATA] if ranks.rank == 0 else []
        return folders.fingerprints(partial, names)

    problem, fingerprints = ranks.attempt(write_files)

    def make_visible() -> None:
        files = {name: entry for entries in fingerprints for name, entry in entries.items()}
        unknown = {path.name for path in partial.glob("*.distcp")} - files.keys()
        if unknown:
            raise ValueError(f"no rank has fingerprinted {', '.join(sorted(unknown))}")
        record = {
            "schema": folders.SCHEMA,
            "step": folders.step_of(folder),
            "ranks": ranks.size,
            "torch": torch.__version__,
            "files": files,
        }
        folders.commit(folder, record)

    if problem is None:
        problem, _ = ranks.first(make_visible)
    if problem is not None and ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return problem
