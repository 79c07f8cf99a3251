"""Hash routing: experts that follow from the token alone; nothing is learned, nothing is drawn.

No kernel: a few integer operations on a vector of token ids, then the counting sort.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops.ops._routing_plan import RoutingPlan


def hash_route(
    token_ids: torch.Tensor,
    num_experts: int,
    *,
    top_k: int = 1,
    table: torch.Tensor | None = None,
    seed: int = 0,
) -> RoutingPlan:
    """Route each token by its id: by a table, or by a hash.

    Args:
        token_ids: ``[T]`` int32 or int64; any integers for the hash, rows of ``table`` otherwise.
        num_experts: ``E``.
        top_k: experts of a token, all different; with a table, its columns.
        table: ``[vocabulary, k]`` int32 or int64: the experts of each id, for example balanced by
            the frequency of the ids.
        seed: gives another hash, for example another one per layer.

    Returns:
        The plan; every weight is ``1 / k``.

    Raises:
        ValueError: a shape or device does not fit, or ``top_k`` is above the experts.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        The hash is the finalizer of SplitMix64, the same on every device: its upper and lower
        halves give the first expert and the distance to the next. Ids that are equal are routed
        alike, always.

    Reference:
        Roller et al.: Hash Layers For Large Sparse Models, arXiv:2106.04426.

    Example:
        >>> import torch, fusedops
        >>> ids = torch.tensor([7, 8, 7])
        >>> plan = fusedops.hash_route(ids, 4, table=torch.arange(10)[:, None] % 4)
        >>> plan.expert_ids.flatten().tolist()
        [3, 0, 3]
    """
    _check(token_ids, num_experts, top_k, table, seed)
    if table is not None:
        experts = table[token_ids]
    else:
        experts = _hashed(token_ids.to(torch.int64), num_experts, top_k, seed)
    probs = torch.full(experts.shape, 1.0 / experts.shape[1], device=experts.device)
    return RoutingPlan.from_choices(experts, probs, num_experts)


def _check(token_ids: Any, num_experts: Any, top_k: Any, table: Any, seed: Any) -> None:
    op = "hash_route"
    for name, value, dims in (("token_ids", token_ids, 1), ("table", table, 2)):
        if name == "table" and value is None:
            continue
        checks.index_tensor(op, name, value, dtypes=(torch.int32, torch.int64))
        if value.dim() != dims:
            checks.fail(op, name, f"of {dims} dims", list(value.shape))
        if value.device != token_ids.device:
            checks.fail(op, name, f"on {token_ids.device}, the device of token_ids", value.device)
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("seed", seed)):
        checks.integer(op, name, value)
    if num_experts < 1:
        checks.fail(op, "num_experts", "at least 1", num_experts)
    if not 1 <= top_k <= num_experts:
        checks.fail(op, "top_k", f"from 1 to {num_experts}, the number of experts", top_k)


def _hashed(ids: torch.Tensor, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Return ``[T, top_k]`` different experts: ``first + j * step``, with ``step`` short enough."""
    mixed = _mix(ids + _signed(0x9E3779B97F4A7C15 * (seed + 1)))
    first = (mixed & 0x7FFFFFFF) % num_experts
    if top_k == 1:
        return first[:, None]
    step = 1 + ((mixed >> 32) & 0x7FFFFFFF) % ((num_experts - 1) // (top_k - 1))
    places = torch.arange(top_k, device=ids.device)
    return (first[:, None] + places * step[:, None]) % num_experts


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer in int64, whose products wrap."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
