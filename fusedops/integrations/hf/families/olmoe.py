"""Rules for OLMoE."""

from transformers.models.olmoe import modeling_olmoe

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks

RULES = moe_like.rules(
    modeling_olmoe,
    "Olmoe",
    __name__,
    routers.SoftmaxAsConfigured,
    ("SparseMoeBlock", sparse_blocks.SparseBlock),
)
