"""Rules for XLM-RoBERTa, whose modules are RoBERTa's."""

from transformers.models.xlm_roberta import modeling_xlm_roberta

from fusedops.integrations.hf.families import bert_like

RULES = bert_like.roberta_rules(modeling_xlm_roberta, "XLMRoberta", __name__)
