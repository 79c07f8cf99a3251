"""The eager attention that the specs of the attention ops compare with: plain torch, written out.

Independent of ``ops/_attention_math.py``, in the dtype of its arguments, as models write it.
"""

from __future__ import annotations

import torch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    right: int = -1,
    left: int = -1,
    offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output ``[B, H, Sq, Dv]`` and log-sum-exp; ``[B, H, S, D]`` arguments."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(key.shape[2], device=query.device) - offset
    distance = distance - torch.arange(query.shape[2], device=query.device)[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * distance.abs()
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        forbidden = forbidden | (distance > right)
    if left >= 0:
        forbidden = forbidden | (distance < -left)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        forbidden = forbidden | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
    scores = scores.masked_fill(forbidden, -torch.inf)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, weights)
    return torch.nn.functional.dropout(weights, dropout_p) @ value, lse
