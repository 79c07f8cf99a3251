"""Planning: what a layout takes on each device, before anything runs (``docs/planning.md``)."""

from __future__ import annotations

from typing import Any

from fusedops._core.deprecation import former_name
from fusedops.models import PRESETS, TransformerConfig, preset
from fusedops.planner.configurations import from_config
from fusedops.planner.layout import Layout, TrainingShape, check
from fusedops.planner.memory import Estimate, estimate
from fusedops.planner.search import Plan, layouts, plan
from fusedops.planner.sizes import parse_bytes, show_bytes, show_count

__all__ = [
    "PRESETS",
    "Estimate",
    "Layout",
    "Plan",
    "TrainingShape",
    "check",
    "estimate",
    "from_config",
    "layouts",
    "parse_bytes",
    "plan",
    "preset",
    "show_bytes",
    "show_count",
]


def __getattr__(name: str) -> Any:
    if name == "Transformer":
        return former_name(__name__, name, TransformerConfig)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
