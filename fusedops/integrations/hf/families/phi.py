"""Rules for Phi: parallel attention and feed-forward layers behind one norm.

Their outputs, the two dropouts and the residual stream are summed by torch.
"""

from transformers.models.phi import modeling_phi

from fusedops.integrations.hf.rules.attention import attention_rule

RULES = (attention_rule(modeling_phi.PhiAttention, __name__, eager=True, rotary=True),)
