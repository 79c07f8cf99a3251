"""moe_relayout: converts the rows of experts from one layout to another, each by a gather.

docs/moe.md has a picture.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops.ops import _moe_math as formulas
from fusedops.ops._routing_plan import RoutingPlan, check_plan
from fusedops.ops.moe_sort import moe_sort

LAYOUTS = ("token_major", "k_major", "capacity")


def moe_relayout(
    input: torch.Tensor, plan: RoutingPlan, source: str, target: str, *, capacity: int | None = None
) -> torch.Tensor:
    """Convert the experts' rows from one layout to another.

    With ``begin[e] = offsets[e - 1]`` and ``count = tokens_per_expert``:

    * ``"token_major"``, the layout of ``moe_permute``: row ``begin[e] + i`` is the ``i``-th slot of
      expert ``e`` by ``(token, choice)``;
    * ``"k_major"``: the same rows, by ``(choice, token)``: all first choices, then all second ones;
    * ``"capacity"``: ``[e, i]`` is row ``begin[e] + i`` of ``"token_major"`` where ``i <
      count[e]``, zeros after them.

    Args:
        input: ``[tokens * top_k, hidden]`` or, in the layout ``"capacity"``,
            ``[num_experts, capacity, hidden]``; any floating dtype, any strides.
        plan: of the tokens whose rows these are.
        source: the layout of ``input``.
        target: the layout of the result.
        capacity: rows per expert, ``plan.capacity`` by default. Static: shapes never depend on the
            routing. Rows beyond it are dropped: they are zeros after a conversion to another
            layout.

    Returns:
        The rows in the layout ``target``, dtype of ``input``, contiguous. Padding rows, after
        ``offsets[-1]`` or an expert's count, are zeros in the result and are not read in ``input``.

    Raises:
        ValueError: plan and input do not fit, a layout is unknown, or the capacity is missing.
        TypeError: an argument is no tensor or no plan, or its dtype does not fit.

    Note:
        Copies bits, reads and writes each row once; no host sync. The gradient is the inverse
        conversion. Saves index tensors only; twice differentiable. Columns may be sharded. Autocast
        does not change the call.

    Reference:
        Lepikhin et al.: GShard, arXiv:2006.16668 (capacity).

    Example:
        >>> import torch, fusedops
        >>> ids = torch.tensor([[1, 0], [1, 2]])
        >>> plan = fusedops.RoutingPlan.from_choices(ids, torch.ones(2, 2), num_experts=3)
        >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> fusedops.moe_relayout(rows, plan, "token_major", "capacity", capacity=2).squeeze(2)
        tensor([[1., 0.],
                [2., 3.],
                [4., 0.]])
    """
    op = "moe_relayout"
    check_plan(op, plan)
    for name, layout in (("source", source), ("target", target)):
        checks.choice(op, name, layout, LAYOUTS)
    size = _check(input, plan, source, target, capacity)
    # For each row of ``target`` its row of ``source``, and the inverse; -1 for none.
    source_rows, source_places = _places(plan, source, size)
    target_rows, target_places = _places(plan, target, size)
    index, inverse = _follow(target_rows, source_places), _follow(source_rows, target_places)
    rows = _OP(input.flatten(0, 1) if source == "capacity" else input, index, inverse)
    if target == "capacity":
        rows = rows.view(plan.num_experts, size, input.shape[-1])
    return rows


def _check(input: Any, plan: RoutingPlan, source: str, target: str, capacity: Any) -> int:
    """Raise unless the arguments fit; return the capacity, 0 where none is needed."""
    op = "moe_relayout"
    if "capacity" not in (source, target):
        formulas.check(op, input, plan, of_tokens=False)
        return 0
    if capacity is None:
        capacity = plan.capacity
    if capacity is None:
        checks.fail(op, "capacity", "given: the plan has none", None)
    checks.integer(op, "capacity", capacity)
    if capacity < 0 or plan.num_experts * capacity >= 2**31:
        checks.fail(op, "capacity", "from 0, with fewer than 2**31 rows in all", capacity)
    if source != "capacity":
        formulas.check(op, input, plan, of_tokens=False)
        return int(capacity)
    checks.tensor(op, "input", input)
    formulas.check_order(op, plan, input)
    expected = (plan.num_experts, capacity)
    if input.dim() != 3 or tuple(input.shape[:2]) != expected:
        sizes = f"[{expected[0]}, {expected[1]}, hidden] (num_experts, capacity)"
        checks.fail(op, "input", f"of shape {sizes}", list(input.shape))
    return int(capacity)


def _follow(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``second[first]``, -1 where ``first`` is."""
    if second.numel() == 0 or first.numel() == 0:
        return torch.full_like(first, -1)
    return torch.where(first >= 0, second[first.clamp_min(0)], -1)


def _places(plan: RoutingPlan, layout: str, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row of a layout its token-major row, and the inverse; -1 for none."""
    positions, offsets = plan.positions, plan.offsets
    row = torch.arange(positions.numel(), dtype=torch.int32, device=positions.device)
    real = row < offsets[-1]
    if layout == "token_major":
        own = torch.where(real, row, -1)
        return own, own
    if layout == "k_major":
        # The same sort over the transposed choices. Dropped slots stand behind in both.
        kept = formulas.kept_slots(positions, offsets)
        order = moe_sort(plan.expert_ids.t(), plan.num_experts, kept=kept.t())
        rows = _follow(order[0], positions.t().flatten())
        places = _follow(plan.permutation, order[1].t().flatten())
        return torch.where(real, rows, -1), torch.where(real, places, -1)
    counts = plan.tokens_per_expert
    begin = offsets - counts
    place = torch.arange(capacity, dtype=torch.int32, device=positions.device)
    rows = torch.where(place < counts[:, None], begin[:, None] + place, -1).flatten()
    expert = torch.searchsorted(offsets.contiguous(), row, right=True, out_int32=True)
    expert = expert.clamp_max(plan.num_experts - 1)
    within = row - begin[expert]
    return rows, torch.where(real & (within < capacity), expert * capacity + within, -1)


def _reference(input: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    if input.shape[0] == 0:
        return input.new_zeros(index.shape[0], input.shape[1])
    rows = input.index_select(0, index.clamp_min(0))
    return torch.where((index >= 0).unsqueeze(1), rows, input.new_zeros(()))


def _backward(*args: Any) -> torch.Tensor | None:
    grad_output, index, inverse, output_mask = args
    return _reference(grad_output, inverse, index) if output_mask[0] else None


_OP = define_op(
    "moe_relayout",
    "(Tensor input, Tensor index, Tensor inverse) -> (Tensor output)",
    contract={
        "index": "int32 [rows]",
        "inverse": "int32 [source_rows]",
        "input": "T [source_rows, features]",
        "output": "T [rows, features]",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input",), outputs=("output",), saves=("index", "inverse"), reference=_backward
    ),
    triton="fusedops.kernels.moe_relayout",
    shard=formulas.shard_columns,
    shard_backward=formulas.shard_columns,
)
