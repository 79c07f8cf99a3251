"""Rules for CamemBERT, whose modules are RoBERTa's."""

from __future__ import annotations

from transformers.models.camembert import modeling_camembert

from fusedops.integrations.hf.families import bert_like
from fusedops.integrations.hf.rules.rule import by_name

RULES = bert_like.roberta_rules(modeling_camembert, "Camembert", __name__)
globals().update(by_name(RULES))
