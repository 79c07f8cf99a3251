"""Rules for Mixtral."""

from __future__ import annotations

from transformers.models.mixtral import modeling_mixtral

from fusedops.integrations.hf.families import llama_like, moe_like
from fusedops.integrations.hf.rules import routers, sparse_blocks
from fusedops.integrations.hf.rules.rule import by_name

RULES = moe_like.rules(
    modeling_mixtral,
    "Mixtral",
    __name__,
    routers.SoftmaxRouter,
    ("SparseMoeBlock", sparse_blocks.NoisyBlock),
    layer=llama_like.PositionsFirst,
    dense_mlp=False,
)
globals().update(by_name(RULES))
