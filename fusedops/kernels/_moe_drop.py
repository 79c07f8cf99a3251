"""The slots that a capacity drops, by sorts on the device: the specification, and the GPU path.

It has no kernel of its own: torch's stable sorts and gathers, without a host sync. The C++ kernel
(``csrc/cpu/moe/moe_route.cpp``) counts instead.
"""

from __future__ import annotations

import torch


def drop(
    expert_ids: torch.Tensor, probs: torch.Tensor, num_experts: int, capacity: int, policy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep at most ``capacity`` slots of each expert; ids and weights are ``[T, k]``.

    Returns the ids, which the policy ``"rounds"`` alone changes, and the mask of the kept.
    """
    if policy in ("probability", "expert_choice"):
        order = probs.reshape(-1).sort(descending=True, stable=True).indices
        ranks = torch.empty_like(order)
        ranks[order] = _ranks(expert_ids.reshape(-1)[order], num_experts)
        return expert_ids, (ranks < capacity).view(expert_ids.shape)
    rounds = expert_ids.t()
    if policy == "position":
        # All first choices stand before all second ones.
        ranks = _ranks(rounds.reshape(-1), num_experts).view(rounds.shape)
        return expert_ids, (ranks < capacity).t().contiguous()
    # Index num_experts is a dummy expert: that of tokens whose choice was dropped before.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_ids.device)
    ids = [rounds[0]]
    kept: list[torch.Tensor] = []
    stuck = torch.zeros_like(rounds[0], dtype=torch.bool)
    for choice in rounds:
        now = torch.where(stuck, ids[-1], choice)
        counted = torch.where(stuck, num_experts, now).long()
        fits = (_ranks(counted, num_experts + 1) + counts[counted] < capacity) & ~stuck
        counts = counts.scatter_add(0, counted, fits.long())
        stuck = ~fits
        ids.append(now)
        kept.append(fits)
    return torch.stack(ids[1:], 1), torch.stack(kept, 1)


def _ranks(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many earlier elements of a vector have the same id."""
    wide = ids.long()
    order = wide.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, wide, torch.ones_like(wide))
    begins = counts.cumsum(0) - counts
    ranks = torch.empty_like(wide)
    ranks[order] = torch.arange(wide.numel(), device=ids.device) - begins[wide[order]]
    return ranks
