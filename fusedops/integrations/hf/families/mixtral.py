"""Rules for Mixtral."""

from transformers.models.mixtral import modeling_mixtral

from fusedops.integrations.hf.families import llama_like, moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks

RULES = moe_like.rules(
    modeling_mixtral,
    "Mixtral",
    __name__,
    routers.SoftmaxRouter,
    ("SparseMoeBlock", sparse_blocks.NoisyBlock),
    layer=llama_like.PositionsFirst,
    dense_mlp=False,
)
