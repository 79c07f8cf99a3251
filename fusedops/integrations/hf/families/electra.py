"""Rules for ELECTRA: ``bert_like.py``, and the layer before the generator's projection."""

from transformers.models.electra import modeling_electra

from fusedops.integrations.hf.families import bert_like

RULES = (
    *bert_like.rules(modeling_electra, "Electra", __name__),
    bert_like.dense_act_rule(modeling_electra.ElectraGeneratorPredictions, __name__, "activation"),
)
