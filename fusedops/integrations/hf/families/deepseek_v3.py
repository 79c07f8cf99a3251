"""Rules for DeepSeek-V3: latent attention, experts chosen by groups, and shared ones."""

from transformers.models.deepseek_v3 import modeling_deepseek_v3

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks

RULES = moe_like.rules(
    modeling_deepseek_v3,
    "DeepseekV3",
    __name__,
    routers.GroupedSigmoid,
    ("MoE", sparse_blocks.SharedBlock),
)
