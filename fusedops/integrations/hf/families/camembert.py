"""Rules for CamemBERT, whose modules are RoBERTa's."""

from transformers.models.camembert import modeling_camembert

from fusedops.integrations.hf.families import bert_like

RULES = bert_like.roberta_rules(modeling_camembert, "Camembert", __name__)
