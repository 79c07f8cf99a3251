"""Optimizers over the ops: AdamW in one pass with any mix of dtypes, and norms of whole models."""

from fusedops.optim.adamw import AdamW
from fusedops.optim.norms import clip_grad_norm_, global_norm
from fusedops.optim.offloaded import OffloadedAdamW

__all__ = ["AdamW", "OffloadedAdamW", "clip_grad_norm_", "global_norm"]
