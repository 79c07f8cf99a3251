"""Rules for RoBERTa: ``bert_like.py``, and the head of its masked language model."""

from transformers.models.roberta import modeling_roberta

from fusedops.integrations.hf.families import bert_like

RULES = bert_like.roberta_rules(modeling_roberta, "Roberta", __name__)
