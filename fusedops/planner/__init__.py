"""Planning: what a layout takes on each device, before anything runs (``docs/planning.md``)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusedops.models import PRESETS, preset
from fusedops.planner.communication import CommunicationCurve, CommunicationModel, fit_curve
from fusedops.planner.device import Device, known_devices, load_device
from fusedops.planner.layout import Layout, TrainingShape, check
from fusedops.planner.memory import Estimate, estimate
from fusedops.planner.search import LayoutRanking, plan
from fusedops.planner.shapes import StepShape
from fusedops.planner.space import LayoutSpace
from fusedops.planner.step_time import StepEstimate, step_time
from fusedops.planner.timed_search import TimedLayout, TimedRanking, fastest, step_shape
from fusedops.planner.traffic import step_traffic
from fusedops.terminal.sizes import parse_bytes, show_bytes, show_count

if TYPE_CHECKING:
    from fusedops.planner.sharding import ShardingPlan, auto_parallel
    from fusedops.planner.spatial import SpatialPlan, spatial_plan

__all__ = [
    "PRESETS",
    "CommunicationCurve",
    "CommunicationModel",
    "Device",
    "Estimate",
    "Layout",
    "LayoutRanking",
    "LayoutSpace",
    "ShardingPlan",
    "SpatialPlan",
    "StepShape",
    "StepEstimate",
    "TimedLayout",
    "TimedRanking",
    "TrainingShape",
    "auto_parallel",
    "check",
    "estimate",
    "fastest",
    "fit_curve",
    "known_devices",
    "load_device",
    "parse_bytes",
    "plan",
    "preset",
    "show_bytes",
    "show_count",
    "spatial_plan",
    "step_shape",
    "step_time",
    "step_traffic",
]


def __getattr__(name: str) -> Any:
    if name in ("ShardingPlan", "auto_parallel"):  # they import torch.distributed.tensor
        return getattr(importlib.import_module("fusedops.planner.sharding"), name)
    if name in ("SpatialPlan", "spatial_plan"):
        return getattr(importlib.import_module("fusedops.planner.spatial"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
