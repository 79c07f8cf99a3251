"""Rules for BERT: ``bert_like.py``, and the layer before the vocabulary projection."""

from __future__ import annotations

from transformers.models.bert import modeling_bert

from fusedops.integrations.hf import bert_like
from fusedops.integrations.hf.rules import by_name

RULES = (
    *bert_like.rules(modeling_bert, "Bert", __name__),
    bert_like.transform_rule(
        modeling_bert.BertPredictionHeadTransform, __name__, "transform_act_fn"
    ),
)
globals().update(by_name(RULES))
