"""The last good checkpoint of a run, and what the user should know about going on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusedops.checkpoint import Checkpointer, Restored
from fusedops.launch.config_table import InputError
from fusedops.train import corpus as corpora
from fusedops.train.config import Config

# Keys that change what the steps of a run compute.
_OF_VALUES = (
    *("batch", "seed", "data.seq_len", "data.shuffle", "data.documents"),
    *("optimizer.", "schedule.", "precision."),
)


def load_last_good(checkpointer: Checkpointer) -> tuple[Restored | None, list[str]]:
    """Restore the newest checkpoint whose weights are good, and remove later ones.

    Good are weights that a good step followed, or that were saved as good ones.

    Returns:
        What was restored, ``None`` where there is no checkpoint, and notes for the user.

    Raises:
        InputError: the checkpoints are of another model, or none of them is good.
    """
    passed_over: list[str] = []
    try:
        restored = checkpointer.load()
        while restored is not None and not _is_good(restored):
            passed_over.append(f"passed over {restored.folder.name}: it is not finite")
            restored = checkpointer.rollback(restored.step - 1)
    except ValueError as error:
        raise InputError(f"{error}; a new run needs another out") from None
    if restored is not None:
        passed_over += [f"passed over {path.name}: {why}" for path, why in restored.passed_over]
        return restored, [f"resumes from step {restored.step}", *passed_over]
    if passed_over:
        raise InputError(
            f"no checkpoint in {checkpointer.root} has a loss and weights that are finite; start "
            "a new run, with another out and a smaller optimizer.lr"
        )
    return None, []


def _is_good(restored: Restored) -> bool:
    return restored.confirmed or restored.extra.get("finite", True)  # older ones do not say


def changes(saved: Mapping[str, Any], config: Config, corpus: str) -> list[str]:
    """Return notes about what differs from the run that saved a checkpoint.

    Args:
        saved: the ``extra`` of the checkpoint.
        config: of this run.
        corpus: identity of the tokens of this run.
    """
    notes = []
    if saved["corpus"].startswith(corpora.CONTENT) and saved["corpus"] != corpus:
        notes.append("the corpus is not the one that the run was saved with")
    changed = _changed_keys(saved.get("config", {}), config)
    if changed:
        notes.append(f"changed since the run was saved: {', '.join(changed)}")
    return notes


def _changed_keys(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Return which keys have another value than those of a saved configuration.

    Only those that change what the steps compute.
    """
    changed = []
    before, now = (_flat(json.loads(json.dumps(table))) for table in (saved, asdict(config)))
    for key in sorted(before.keys() & now.keys()):
        if key.startswith(_OF_VALUES) and before[key] != now[key]:
            changed.append(f"{key} {before[key]} -> {now[key]}")
    return changed


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, Mapping)
        values |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return values
