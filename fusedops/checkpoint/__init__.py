"""Checkpoints that survive a killed process, a full disk and a damaged file (``checkpoint.md``)."""

from fusedops.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    CheckpointInfo,
    Restored,
    newest,
)
from fusedops.checkpoint.guard import Guard, GuardDecision, GuardError

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "Guard",
    "GuardDecision",
    "GuardError",
    "Restored",
    "newest",
]
