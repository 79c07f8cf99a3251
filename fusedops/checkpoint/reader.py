"""Reading one checkpoint: whether it is complete and fits, and the state that it restores."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.checkpoint import folder as folders
from fusedops.checkpoint import rank_file
from fusedops.checkpoint.ranks import CheckpointRanks
from fusedops.checkpoint.tensors import State
from fusedops.runtime import generators

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What ``load`` gave back.

    Attributes:
        step: at which it was saved.
        data: the position in the data, as it was given to ``save`` by this rank; by the first rank
            where there was no such rank.
        extra: what else was given.
        folder: of the checkpoint.
        confirmed: whether a good step followed it (``Checkpointer.confirm``).
        passed_over: newer checkpoints that are damaged, each with the reason.
    """

    step: int
    data: Any
    extra: Any
    folder: Path
    confirmed: bool = False
    passed_over: tuple[tuple[Path, str], ...] = ()


def newest(root: str | os.PathLike[str], step: int | None = None) -> tuple[Path, Any] | None:
    """Return the newest checkpoint's folder and ``extra``, before there is a model to load it into.

    Of its files the first rank's alone is looked at; ``Checkpointer.load`` looks at all.

    Args:
        root: the folder of the checkpoints.
        step: that of a step alone.

    Returns:
        ``None`` where there is no checkpoint whose first file is complete.
    """
    for folder in folders.checkpoints(Path(root), step):
        try:
            folders.verify(folder, folders.manifest(folder), [rank_file.name_of(0)])
        except folders.Damaged:
            continue
        return folder, rank_file.read(folder, 0)["extra"]
    return None


def verify(folder: Path, ranks: CheckpointRanks) -> str | None:
    """Return why a checkpoint is damaged, ``None`` if it is not; each rank reads some files."""

    def read_share() -> None:
        record = folders.manifest(folder)
        folders.verify(folder, record, sorted(record["files"])[ranks.rank :: ranks.size])

    problem, _ = ranks.attempt(read_share)
    return problem


def restore(
    folder: Path, state: State, stateful: dict[str, Any], ranks: CheckpointRanks
) -> Restored:
    """Restore a complete checkpoint on all ranks; nothing changes before it is known to fit.

    Raises:
        ValueError: it is of another model or optimizer.
    """
    record = folders.manifest(folder)
    saved = record["ranks"]
    own = rank_file.read(folder, ranks.rank if ranks.rank < saved else 0)
    missing = sorted(stateful.keys() - own["stateful"].keys())
    names = {name for names in ranks.gather(state.names()) for name in names}
    with ranks.raising(ValueError):
        content = state.prepare(folder, names, own["groups"])
        if missing:
            has = ", ".join(sorted(own["stateful"])) or "none"
            raise ValueError(
                f"{folder} has no state of {', '.join(missing)}; in addition to model and "
                f"optimizer it has {has}"
            )
    state.load(folder, content, own["groups"], ranks.group)
    for name, target in stateful.items():
        target.load_state_dict(own["stateful"][name])
    if ranks.rank < saved:
        generators.restore(own["generators"])
    else:
        generators.seed(record["step"] * ranks.size + ranks.rank)
    if ranks.rank == 0:
        _log.info("restored %s", folder)
        if saved != ranks.size:
            _log.warning(
                "saved by %d ranks and loaded by %d: random numbers are others than if the run had "
                "not stopped",
                saved,
                ranks.size,
            )
    return Restored(
        step=record["step"],
        data=own["data"],
        extra=own["extra"],
        folder=folder,
        confirmed=ranks.from_first(folders.is_confirmed(folder)),
    )
