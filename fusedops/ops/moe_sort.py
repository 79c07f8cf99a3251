"""moe_sort: a stable counting sort of the experts' choices, on every backend without a host sync.

A stable sort has a unique result, which does not depend on backend, thread count or chunk size.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import define_op
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops._core.tracing import holds_for_all

MOST_EXPERTS = 1 << 24
Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moe_sort(
    expert_ids: torch.Tensor, num_experts: int, *, kept: torch.Tensor | None = None
) -> Sorted:
    """Sort the slots of a routing by expert.

    ``permutation = argsort([expert_ids[t, j] if kept[t, j] else num_experts], stable=True)`` over
    the slots ``t * top_k + j``, and ``positions`` is its inverse. For ``expert_ids`` ``[[1, 0], [1,
    2], [0, 1]]`` the rows are slots ``1 4 | 0 2 5 | 3``: experts 0, 1, 2, and within each the
    tokens in order.

    Args:
        expert_ids: ``[tokens, top_k]`` int32 or int64, any strides; an id equal to ``num_experts``
            belongs to no expert (the sentinel of expert parallelism): its slot is dropped.
        num_experts: at least 1.
        kept: ``[tokens, top_k]`` bool; slots that are not kept are dropped. Default: all are kept.

    Returns:
        ``(permutation, positions, tokens_per_expert, offsets)``, int32:

        * ``permutation`` ``[tokens * top_k]``: the slot of each row. Always a true permutation:
          dropped slots are at the end, from ``offsets[-1]`` on, in order.
        * ``positions`` ``[tokens, top_k]``: the row of each slot, at least ``offsets[-1]`` for
          dropped slots.
        * ``tokens_per_expert`` ``[num_experts]``: kept slots.
        * ``offsets`` ``[num_experts]``: the end of each expert's rows, as torch's ``grouped_mm``
          takes them.

    Raises:
        ValueError: a shape or device does not fit, or (CPU) an id is below 0 or above
            ``num_experts``; on CUDA, where a check would wait for the device, such a slot is
            dropped.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        A counting sort: two passes over the ids, ``O(tokens * top_k + num_experts)`` on the CPU,
        parallel; three launches on a GPU. Shapes depend only on shapes. The op has no gradient,
        because all tensors are integers. Autocast does not change the call.

    Example:
        >>> import torch, fusedops
        >>> ids = torch.tensor([[1, 0], [1, 2], [0, 1]])
        >>> permutation, positions, counts, offsets = fusedops.moe_sort(ids, 3)
        >>> permutation.tolist(), positions.tolist()
        ([1, 4, 0, 2, 5, 3], [[2, 0], [3, 5], [1, 4]])
        >>> counts.tolist(), offsets.tolist()
        ([2, 3, 1], [2, 5, 6])
    """
    check_choices("moe_sort", expert_ids, num_experts, kept)
    return _OP(expert_ids, kept, num_experts)


def check_choices(op: str, expert_ids: Any, num_experts: Any, kept: Any) -> None:
    """Raise unless ids (of any value), number of experts and mask fit each other."""
    checks.index_tensor(op, "expert_ids", expert_ids, dtypes=(torch.int32, torch.int64))
    if expert_ids.dim() != 2:
        checks.fail(op, "expert_ids", "of 2 dims, [tokens, top_k]", list(expert_ids.shape))
    checks.integer(op, "num_experts", num_experts, least=1)
    if holds_for_all(num_experts > MOST_EXPERTS):
        checks.fail(op, "num_experts", f"at most {MOST_EXPERTS}", num_experts)
    if holds_for_all(expert_ids.numel() >= 2**31):
        checks.fail(op, "expert_ids", "of fewer than 2**31 slots: rows are int32", expert_ids.shape)
    if kept is None:
        return
    checks.index_tensor(op, "kept", kept, dtypes=(torch.bool,))
    checks.shape(op, "kept", kept, expert_ids.shape, "that of expert_ids")
    if kept.device != expert_ids.device:
        checks.fail(op, "kept", f"on {expert_ids.device}, the device of expert_ids", kept.device)


def check_ids(op: str, expert_ids: torch.Tensor, num_experts: int) -> None:
    """Raise unless ids whose values can be read are experts, or ``num_experts``."""
    if not checks.readable(expert_ids) or not expert_ids.numel():
        return
    least, most = (int(extreme) for extreme in expert_ids.aminmax())
    if least >= 0 and most <= num_experts:
        return
    token, choice = ((expert_ids < 0) | (expert_ids > num_experts)).nonzero()[0].tolist()
    expected = f"in [0, {num_experts}), or {num_experts} for nobody"
    got = f"{int(expert_ids[token, choice])} at token {token}, choice {choice}"
    checks.fail(op, "expert_ids", expected, got)


def _reference(expert_ids: torch.Tensor, kept: torch.Tensor | None, num_experts: int) -> Sorted:
    check_ids("moe_sort", expert_ids, num_experts)
    ids = expert_ids.reshape(-1)
    legal = (ids >= 0) & (ids <= num_experts)
    if kept is not None:
        legal = legal & kept.reshape(-1)
    ids = torch.where(legal, ids, num_experts)
    permutation = torch.argsort(ids, stable=True)
    rows = torch.arange(ids.numel(), device=ids.device)
    positions = torch.zeros_like(permutation).scatter(0, permutation, rows)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))[:-1]
    results = (permutation, positions.view(expert_ids.shape), counts, counts.cumsum(0))
    permutation, positions, counts, offsets = (result.to(torch.int32) for result in results)
    return permutation, positions, counts.contiguous(), offsets


def _shard() -> list[Sharding]:
    """The order of all slots needs all of them: nothing is sharded."""
    return [([REPLICATE] * 4, [REPLICATE] * 2)]


_OP = define_op(
    "moe_sort",
    "(Tensor expert_ids, Tensor? kept, SymInt num_experts)"
    " -> (Tensor permutation, Tensor positions, Tensor tokens_per_expert, Tensor offsets)",
    contract={
        "expert_ids": "int32 | int64 [tokens, top_k]",
        "kept": "bool [tokens, top_k]",
        "num_experts": f"0 <= num_experts <= {MOST_EXPERTS}",
        "permutation": "int32 [tokens * top_k]",
        "positions": "int32 [tokens, top_k]",
        "tokens_per_expert, offsets": "int32 [num_experts]",
    },
    reference=_reference,
    triton="fusedops.kernels.moe_sort",
    shard=_shard,
)
