"""Rules for ELECTRA: ``bert_like.py``, the layer before the generator's projection, the loss."""

from transformers.models.electra import modeling_electra

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.lm_heads import head_rule

RULES = (
    *bert_like.rules(modeling_electra, "Electra", __name__),
    bert_like.dense_act_rule(modeling_electra.ElectraGeneratorPredictions, __name__, "activation"),
    head_rule(modeling_electra.ElectraForMaskedLM, __name__),
)
