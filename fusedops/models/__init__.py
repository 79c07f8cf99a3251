"""A plain transformer of any published kind, and its configurations (``docs/models.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedops.models.attention_core import Documents
from fusedops.models.config import TransformerConfig
from fusedops.models.huggingface.configs import from_config, to_config
from fusedops.models.huggingface.weights import (
    fill_huggingface,
    load_huggingface,
    save_huggingface,
)
from fusedops.models.initialize import initialize
from fusedops.models.parallelization.config import ParallelConfig
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.presets import PRESETS, TINY, preset
from fusedops.models.rotary import RopeScaling
from fusedops.models.transformer import Loss, Transformer

if TYPE_CHECKING:
    from fusedops.models.parallelization.parallelize import parallelize

__all__ = [
    "PRESETS",
    "TINY",
    "Documents",
    "Loss",
    "ParallelConfig",
    "RopeScaling",
    "TrainEngine",
    "Transformer",
    "TransformerConfig",
    "from_config",
    "initialize",
    "parallelize",
    "fill_huggingface",
    "load_huggingface",
    "preset",
    "save_huggingface",
    "to_config",
]


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor, on which it is built, takes a second to import.
    if name == "parallelize":
        from fusedops.models.parallelization.parallelize import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
