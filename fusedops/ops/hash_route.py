"""Hash routing: the experts depend on the token only; nothing is learned or random.

It has no kernel: it is a few integer operations on a vector of token ids, and the counting sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.device_tensors import device_tensor
from fusedops.ops._routing_plan import RoutingPlan
from fusedops.ops.moe_sort import MOST_EXPERTS

_OP = "hash_route"


def hash_route(
    token_ids: torch.Tensor,
    num_experts: int,
    *,
    top_k: int = 1,
    table: torch.Tensor | None = None,
    seed: int = 0,
    domains: torch.Tensor | None = None,
    domain_experts: Sequence[int] | None = None,
) -> RoutingPlan:
    """Route each token by its id (by a table or a hash), or by its domain and its id.

    Args:
        token_ids: ``[T]`` int32 or int64; any integers for the hash, rows of ``table`` otherwise.
        num_experts: ``E``.
        top_k: experts of a token, all different; with a table, 1 or the number of its columns.
        table: ``[vocabulary, k]`` int32 or int64: the experts of each id, for example balanced by
            the frequency of the ids.
        seed: gives another hash, for example another one per layer.
        domains: ``[T]`` int32 or int64: the domain of each token, such as a language.
        domain_experts: how many experts each domain has: those of domain 0 first, ``E`` together.

    Returns:
        The plan; every weight is ``1 / k``.

    Raises:
        ValueError: a shape or device does not fit, ``top_k`` is above the experts (of a domain), or
            (CPU) a token is no row of the table, the table has an expert that does not exist, or a
            domain has no experts.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        The hash is the finalizer of SplitMix64, the same on every device: its upper and lower
        halves give the first expert and the distance to the next. Equal ids always have the same
        experts.

    Reference:
        Roller et al.: Hash Layers For Large Sparse Models, arXiv:2106.04426. Ren et al.:
        PanGu-Sigma, arXiv:2303.10845 (random routed experts).

    Example:
        >>> import torch, fusedops
        >>> ids = torch.tensor([7, 8, 7])
        >>> plan = fusedops.hash_route(ids, 4, table=torch.arange(10)[:, None] % 4)
        >>> plan.expert_ids.flatten().tolist()
        [3, 0, 3]
    """
    _check(token_ids, num_experts, top_k, table, seed)
    if domains is not None or domain_experts is not None:
        sizes = _check_domains(token_ids, num_experts, top_k, table, domains, domain_experts)
        assert domains is not None
        counts = device_tensor(sizes, torch.int64, token_ids.device)
        domain = domains.to(torch.int64)
        first = (counts.cumsum(0) - counts)[domain]
        within = _hashed(token_ids.to(torch.int64), counts[domain], top_k, seed)
        experts = first[:, None] + within
    elif table is not None:
        experts = _looked_up(token_ids, table, num_experts)
    else:
        count = torch.full((), num_experts, device=token_ids.device)
        experts = _hashed(token_ids.to(torch.int64), count, top_k, seed)
    probs = torch.full(experts.shape, 1.0 / experts.shape[1], device=experts.device)
    return RoutingPlan.from_choices(experts, probs, num_experts)


def _check(token_ids: Any, num_experts: Any, top_k: Any, table: Any, seed: Any) -> None:
    for name, value, dims in (("token_ids", token_ids, 1), ("table", table, 2)):
        if name == "table" and value is None:
            continue
        checks.index_tensor(_OP, name, value, dtypes=(torch.int32, torch.int64))
        if value.dim() != dims:
            checks.fail(_OP, name, f"of {dims} dims", list(value.shape))
        if value.device != token_ids.device:
            checks.fail(_OP, name, f"on {token_ids.device}, the device of token_ids", value.device)
    checks.integer(_OP, "num_experts", num_experts, least=1)
    checks.integer(_OP, "top_k", top_k)
    checks.integer(_OP, "seed", seed)
    if num_experts > MOST_EXPERTS:
        checks.fail(_OP, "num_experts", f"at most {MOST_EXPERTS}", num_experts)
    if not 1 <= top_k <= num_experts:
        checks.fail(_OP, "top_k", f"from 1 to {num_experts}, the number of experts", top_k)
    if table is not None:
        columns = table.shape[1]
        if not 1 <= columns <= num_experts:
            expected = f"of 1 to {num_experts} columns, the number of experts"
            checks.fail(_OP, "table", expected, list(table.shape))
        if top_k not in (1, columns):
            checks.fail(_OP, "top_k", f"{columns}, the columns of table", top_k)


def _looked_up(token_ids: torch.Tensor, table: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the experts of each token that a table has, ``[T, k]``; on the CPU checked."""
    rows = len(table)
    expected = f"rows of table, at least 0 and less than {rows}"
    checks.indices(_OP, "token_ids", token_ids, rows, expected)
    experts = table[token_ids]
    expected = f"of experts from 0 to {num_experts - 1}, or {num_experts} for nobody"
    checks.indices(_OP, "table", experts, num_experts + 1, expected)
    return experts


def _check_domains(
    token_ids: torch.Tensor,
    num_experts: int,
    top_k: int,
    table: Any,
    domains: Any,
    domain_experts: Any,
) -> tuple[int, ...]:
    """Return how many experts each domain has."""
    sizes = check_domain_experts(_OP, domain_experts, num_experts, top_k)
    if table is not None:
        checks.fail(_OP, "table", "None with domains", "a tensor")
    checks.index_tensor(_OP, "domains", domains, dtypes=(torch.int32, torch.int64))
    checks.shape(_OP, "domains", domains, token_ids.shape, "that of token_ids")
    if domains.device != token_ids.device:
        checks.fail(_OP, "domains", f"on {token_ids.device}, as token_ids", domains.device)
    expected = f"from 0 to {len(sizes) - 1}, of domain_experts {sizes}"
    checks.indices(_OP, "domains", domains, len(sizes), expected)
    return sizes


def check_domain_experts(op: str, sizes: Any, num_experts: int, top_k: int) -> tuple[int, ...]:
    """Return how many experts each domain has; raise unless they share all, ``top_k`` at least."""
    counts = checks.sizes(op, "domain_experts", sizes)
    if sum(counts) != num_experts or not counts:
        expected = f"numbers that add up to {num_experts}, the experts"
        checks.fail(op, "domain_experts", expected, counts)
    if min(counts) < top_k:
        checks.fail(op, "domain_experts", f"at least top_k, {top_k}, each", counts)
    return counts


def _hashed(ids: torch.Tensor, sizes: torch.Tensor, top_k: int, seed: int) -> torch.Tensor:
    """Return ``[T, top_k]`` different numbers below each token's size, a scalar or ``[T]``.

    ``first + j * step``, with ``step`` short enough.
    """
    mixed = _mix(ids + _signed(0x9E3779B97F4A7C15 * (seed + 1)))
    first = (mixed & 0x7FFFFFFF) % sizes
    if top_k == 1:
        return first[:, None]
    step = 1 + ((mixed >> 32) & 0x7FFFFFFF) % ((sizes - 1) // (top_k - 1))
    places = torch.arange(top_k, device=ids.device)
    return (first[:, None] + places * step[:, None]) % sizes[..., None]


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
