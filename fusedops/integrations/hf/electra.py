"""Rules for ELECTRA: ``bert_like.py``, and the layer before the generator's projection."""

from __future__ import annotations

from transformers.models.electra import modeling_electra

from fusedops.integrations.hf import bert_like
from fusedops.integrations.hf.rules import by_name

RULES = (
    *bert_like.rules(modeling_electra, "Electra", __name__),
    bert_like.transform_rule(modeling_electra.ElectraGeneratorPredictions, __name__, "activation"),
)
globals().update(by_name(RULES))
