"""A plain transformer of any published kind, and its configurations (``docs/models.md``)."""

from __future__ import annotations

from fusedops.models.config import RopeScaling, TransformerConfig
from fusedops.models.configurations import from_config, to_config
from fusedops.models.huggingface import load_huggingface, save_huggingface
from fusedops.models.initialize import initialize
from fusedops.models.parallel_config import ParallelConfig
from fusedops.models.presets import PRESETS, TINY, preset
from fusedops.models.transformer import Documents, Loss, Transformer

__all__ = [
    "PRESETS",
    "TINY",
    "Documents",
    "Loss",
    "ParallelConfig",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "from_config",
    "initialize",
    "load_huggingface",
    "preset",
    "save_huggingface",
    "to_config",
]
