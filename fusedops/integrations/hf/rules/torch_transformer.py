"""Rules for the feed-forward layers of ``nn.TransformerEncoderLayer`` and its decoder layer."""

from __future__ import annotations

from torch import nn

from fusedops.integrations.hf import patched
from fusedops.integrations.hf.rules.chain import chain_rule
from fusedops.integrations.hf.rules.rule import PatchRule


def _rule(original: type[nn.Module], dropout: str) -> PatchRule:
    steps = ("linear1", "activation", "dropout", "linear2", dropout)
    return chain_rule(original, patched.module_of(original), steps, method="_ff_block")


RULES = (
    _rule(nn.TransformerEncoderLayer, "dropout2"),
    _rule(nn.TransformerDecoderLayer, "dropout3"),
)
