"""Checkpoints that survive a killed process, a full disk and a damaged file (``checkpoint.md``)."""

from fusedops.checkpoint.checkpointer import Checkpointer, CheckpointError
from fusedops.checkpoint.guard import Guard, GuardDecision, GuardError
from fusedops.checkpoint.reader import Restored, newest

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Guard",
    "GuardDecision",
    "GuardError",
    "Restored",
    "newest",
]
