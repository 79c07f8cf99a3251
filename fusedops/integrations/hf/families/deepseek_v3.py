"""Rules for DeepSeek-V3: latent attention, experts chosen by groups, and shared ones."""

from __future__ import annotations

from transformers.models.deepseek_v3 import modeling_deepseek_v3

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks
from fusedops.integrations.hf.rules.rule import by_name

RULES = moe_like.rules(
    modeling_deepseek_v3,
    "DeepseekV3",
    __name__,
    routers.GroupedSigmoid,
    ("MoE", sparse_blocks.SharedBlock),
)
globals().update(by_name(RULES))
