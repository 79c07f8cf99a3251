"""Rules for XLM-RoBERTa, whose modules are RoBERTa's."""

from __future__ import annotations

from transformers.models.xlm_roberta import modeling_xlm_roberta

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = bert_like.roberta_rules(modeling_xlm_roberta, "XLMRoberta", __name__)
globals().update(by_name(RULES))
