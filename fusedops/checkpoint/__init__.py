"""Checkpoints that survive a killed process, a full disk and a damaged file (``checkpoint.md``)."""

from fusedops.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    Restored,
    Saved,
    newest,
)
from fusedops.checkpoint.guard import Guard, GuardError, Verdict

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Guard",
    "GuardError",
    "Restored",
    "Saved",
    "Verdict",
    "newest",
]
