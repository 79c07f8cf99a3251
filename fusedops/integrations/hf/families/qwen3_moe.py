"""Rules for Qwen3-MoE."""

from transformers.models.qwen3_moe import modeling_qwen3_moe

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks

RULES = moe_like.rules(
    modeling_qwen3_moe,
    "Qwen3Moe",
    __name__,
    routers.SoftmaxAsConfigured,
    ("SparseMoeBlock", sparse_blocks.SparseBlock),
)
