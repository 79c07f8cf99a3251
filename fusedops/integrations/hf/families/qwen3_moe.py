"""Rules for Qwen3-MoE."""

from __future__ import annotations

from transformers.models.qwen3_moe import modeling_qwen3_moe

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks
from fusedops.integrations.hf.rules.rule import by_name

RULES = moe_like.rules(
    modeling_qwen3_moe,
    "Qwen3Moe",
    __name__,
    routers.SoftmaxAsConfigured,
    ("SparseMoeBlock", sparse_blocks.SparseBlock),
)
globals().update(by_name(RULES))
