"""Rules for ELECTRA: ``bert_like.py``, the layer before the generator's projection, the loss."""

from __future__ import annotations

from transformers.models.electra import modeling_electra

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.lm_heads import head_rule
from fusedops.integrations.hf.rules.rule import by_name

RULES = (
    *bert_like.rules(modeling_electra, "Electra", __name__),
    bert_like.transform_rule(modeling_electra.ElectraGeneratorPredictions, __name__, "activation"),
    head_rule(modeling_electra.ElectraForMaskedLM, __name__),
)
globals().update(by_name(RULES))
