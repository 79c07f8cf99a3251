"""Rules for BERT: ``bert_like.py``, and the layer before the vocabulary projection."""

from transformers.models.bert import modeling_bert

from fusedops.integrations.hf.families import bert_like

RULES = (
    *bert_like.rules(modeling_bert, "Bert", __name__),
    bert_like.dense_act_rule(
        modeling_bert.BertPredictionHeadTransform, __name__, "transform_act_fn"
    ),
)
