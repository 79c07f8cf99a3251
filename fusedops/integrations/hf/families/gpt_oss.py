"""Rules for GPT-OSS: attention with sinks, experts with biases and a clamped gate in columns."""

from transformers.models.gpt_oss import modeling_gpt_oss

from fusedops.integrations.hf.families import moe_like
from fusedops.integrations.hf.rules import rms_norms, routers, sparse_blocks

RULES = moe_like.rules(
    modeling_gpt_oss,
    "GptOss",
    __name__,
    routers.SoftmaxOfChosen,
    ("MLP", sparse_blocks.ScoredBlock),
    norm=rms_norms.GPT_OSS,
    dense_mlp=False,
    half_tables=True,
)
