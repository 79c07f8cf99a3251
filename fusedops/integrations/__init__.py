"""Integration of the fused ops with existing models, trainers and exporters."""

from fusedops.integrations.decompositions import decompositions
from fusedops.integrations.hf.patch import (
    describe,
    patch,
    register_attention,
    register_experts,
    unpatch,
)
from fusedops.integrations.hf.report import ModuleReport, PatchReport

__all__ = [
    "ModuleReport",
    "PatchReport",
    "decompositions",
    "describe",
    "patch",
    "register_attention",
    "register_experts",
    "unpatch",
]
