"""Planning: what a layout takes on each device, before anything runs (``docs/planning.md``)."""

from fusedops._core.deprecation import former_names
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

__getattr__ = former_names(__name__, Transformer=TransformerConfig)
