"""Rules for OLMoE."""

from __future__ import annotations

from transformers.models.olmoe import modeling_olmoe

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks
from fusedops.integrations.hf.rules.rule import by_name

RULES = moe_like.rules(
    modeling_olmoe,
    "Olmoe",
    __name__,
    routers.SoftmaxAsConfigured,
    ("SparseMoeBlock", sparse_blocks.SparseBlock),
)
globals().update(by_name(RULES))
