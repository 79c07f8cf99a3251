"""Rules for RoBERTa: ``bert_like.py``, and the head of its masked language model."""

from __future__ import annotations

from transformers.models.roberta import modeling_roberta

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = bert_like.roberta_rules(modeling_roberta, "Roberta", __name__)
globals().update(by_name(RULES))
