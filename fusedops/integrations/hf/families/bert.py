"""Rules for BERT: ``bert_like.py``, the layer before the vocabulary projection, and the loss."""

from transformers.models.bert import modeling_bert

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.lm_heads import head_rule

RULES = (
    *bert_like.rules(modeling_bert, "Bert", __name__),
    bert_like.dense_act_rule(
        modeling_bert.BertPredictionHeadTransform, __name__, "transform_act_fn"
    ),
    head_rule(modeling_bert.BertForMaskedLM, __name__),
)
