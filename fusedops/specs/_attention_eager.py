"""The eager attention that the specs of the attention ops compare with: plain torch, written out.

Independent of ``ops/_attention_math.py``, in the dtype of its arguments, as models write it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    offset: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output ``[B, H, Sq, Dv]`` and log-sum-exp; ``[B, H, S, D]`` arguments."""
    key, value = _per_query_head(query, key, value)
    distance, forbidden = _distances(query, key, attn_mask, *window, offset)
    scores = query @ key.transpose(-1, -2)
    scores = _with_options(scores, distance, query.shape[-1], attn_mask, **options)
    scores = scores.masked_fill(forbidden, -torch.inf)
    scores = _with_sinks(scores, sinks)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype)
    weights = torch.where(lse[..., None] == -torch.inf, 0.0, weights)
    return torch.nn.functional.dropout(weights, dropout_p) @ value, lse


def attend_not_finite(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    forbids_by: str,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    offset: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for arguments that are not finite; a row without scores has no gradient.

    ``forbids_by``: what becomes of a key that a query may not attend. By ``"filling"`` its score
    with -inf, or ``"adding"`` -inf to it, it is multiplied by its probability, 0, and so its NaN
    reaches the query; added to, the score also has a gradient, 0 times that of the probability. By
    ``"skipping"`` nothing of the pair is read.
    """
    assert dropout_p == 0.0, "a random call is compared with the reference"
    key, value = _per_query_head(query, key, value)
    distance, forbidden = _distances(query, key, attn_mask, *window, offset)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        forbidden = forbidden | (attn_mask == -torch.inf)
    shape = (*query.shape[:3], key.shape[2])
    forbidden = forbidden.expand(shape)

    def pairs(tensor: torch.Tensor) -> torch.Tensor:
        expanded = tensor.expand(*shape, tensor.shape[-1])
        skips = forbids_by == "skipping"
        return expanded.masked_fill(forbidden[..., None], 0.0) if skips else expanded

    scores = (pairs(query.unsqueeze(3)) * pairs(key.unsqueeze(2))).sum(-1)
    scores = _with_options(scores, distance, query.shape[-1], attn_mask, **options)
    adds = forbids_by == "adding"
    allowed = _with_sinks(scores, sinks)
    if adds:
        scores = scores + torch.zeros_like(scores).masked_fill(forbidden, -torch.inf)
    else:
        scores = scores.masked_fill(forbidden, -torch.inf)
    scores = _with_sinks(scores, sinks)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = torch.where(empty, allowed, scores) if adds else scores.masked_fill(empty, 0.0)
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, True)
    # Like an online softmax, which returns NaN for a row with an infinite score.
    lse = (top + torch.log(torch.exp(scores - top).sum(-1, keepdim=True)))[..., 0]
    lse = lse.masked_fill(empty[..., 0], -torch.inf)
    weights = torch.softmax(scores, -1)
    weights = weights * ~empty if adds else weights.masked_fill(empty, 0.0)
    weights = weights[..., : key.shape[2]]
    weights = weights.to(value.dtype).unsqueeze(-1)
    return (pairs(weights) * pairs(value.unsqueeze(2))).sum(3), lse


# What a spec's eager function takes as ``attend`` where something is not finite. Kernels skip
# blocks of keys that no query of a block may attend, as torch's own do.
NOT_FINITE: tuple[Attend, ...] = tuple(
    functools.partial(attend_not_finite, forbids_by=way)
    for way in ("skipping", "filling", "adding")
)


def _per_query_head(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    groups = query.shape[1] // tensors[0].shape[1]
    return [tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in tensors]


def _distances(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, *place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each key is from each query, and which it may not attend."""
    left, right, offset = place
    distance = torch.arange(key.shape[2], device=query.device) - offset
    distance = distance - torch.arange(query.shape[2], device=query.device)[:, None]
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        forbidden = forbidden | (distance > right)
    if left >= 0:
        forbidden = forbidden | (distance < -left)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        forbidden = forbidden | ~attn_mask
    return distance, forbidden


def _with_options(
    products: torch.Tensor,
    distance: torch.Tensor,
    head_dim: int,
    attn_mask: torch.Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = products * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * distance.abs()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype)
    return scores


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)
