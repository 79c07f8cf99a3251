"""Rules for Qwen2-MoE: some experts are shared, behind a gate of their own."""

from transformers.models.qwen2_moe import modeling_qwen2_moe

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks

RULES = moe_like.rules(
    modeling_qwen2_moe,
    "Qwen2Moe",
    __name__,
    routers.SoftmaxAsConfigured,
    ("SparseMoeBlock", sparse_blocks.GatedSharedBlock),
)
