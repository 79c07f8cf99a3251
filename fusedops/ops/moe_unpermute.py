"""moe_unpermute: returns the experts' rows to their tokens, weighted and summed."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.ops import _moe_math as formulas
from fusedops.ops._routing_plan import RoutingPlan, check_probs


def moe_unpermute(input: torch.Tensor, plan: RoutingPlan, *, weighted: bool = True) -> torch.Tensor:
    """Sum each token's rows, weighted by the router's probabilities.

    ``output[t] = sum_j plan.probs[t, j] * input[plan.positions[t, j]]`` over the slots that were
    kept, in the order ``j = 0, 1, ...``.

    Args:
        input: ``[tokens * top_k, hidden]``, the experts' results in the order of ``moe_permute``;
            any floating dtype; the stride between rows is arbitrary. Rows from ``plan.offsets[-1]``
            on are not read and may be uninitialised.
        plan: the plan that permuted the rows.
        weighted: multiply by ``plan.probs``; ``False`` if the experts have done so already.

    Returns:
        ``[tokens, hidden]``, dtype of ``input``, contiguous. The result of a token without a kept
        slot is 0.

    Raises:
        ValueError: plan and input do not fit; (CPU) a position of the plan is not a row.
        TypeError: an argument is no tensor or no plan, or its dtype does not fit.

    Note:
        Products and sums are float32 (float64 for float64), rounded once. Rows are summed in the
        order of the slots, wherever they were computed: the same bits for any number of expert
        parallel ranks and threads. Gradients: ``probs * grad`` into the kept rows, zeros into the
        others; to ``plan.probs`` the product of row and gradient, 0 where dropped. Saves ``input``
        only if ``plan.probs`` requires a gradient, else index tensors; twice differentiable.
        Columns may be sharded; partial sums (of tensor-parallel experts) stay partial. Autocast
        does not change the call.

    Reference:
        Gale et al.: MegaBlocks, arXiv:2211.15841.

    Example:
        >>> import torch, fusedops
        >>> ids, probs = torch.tensor([[1, 0], [1, 2]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> plan = fusedops.RoutingPlan.from_choices(ids, probs, num_experts=3)
        >>> fusedops.moe_unpermute(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), plan).flatten()
        tensor([1.5000, 3.0000])
    """
    op = "moe_unpermute"
    checks.flag(op, "weighted", weighted)
    formulas.check(op, input, plan, of_tokens=False)
    probs = None
    if weighted:
        check_probs(op, "plan.probs", plan.probs, plan)
        probs = plan.probs.to(dtypes.statistics_dtype(input.dtype))
    return _OP(input, probs, plan.positions, plan.offsets)


def _reference(
    input: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    formulas.check_places("moe_unpermute", positions, offsets)
    return formulas.combine(input, probs, positions, offsets)


def _backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, input, probs, positions, offsets, output_mask = args
    grad_input = grad_probs = None
    if output_mask[0]:
        grad_input = formulas.scatter(grad_output, probs, positions, offsets)
    if output_mask[1] and probs is not None:
        assert input is not None
        slots = formulas.slots_of(input, positions, offsets)
        grad_probs = (slots * grad_output.to(probs.dtype).unsqueeze(1)).sum(2)
        # A dropped slot's row, 0, may meet a gradient that is not finite.
        grad_probs = torch.where(formulas.kept_slots(positions, offsets), grad_probs, 0.0)
    return grad_input, grad_probs


def _shard() -> list[Sharding]:
    """Columns are independent, and the sum is linear in ``input``; rows need the unsharded plan."""
    words: tuple[Placement, ...] = (REPLICATE, 1, PARTIAL)
    return [([word], [word, REPLICATE, REPLICATE, REPLICATE]) for word in words]


_OP = define_op(
    "moe_unpermute",
    "(Tensor input, Tensor? probs, Tensor positions, Tensor offsets) -> (Tensor output)",
    contract={
        "positions": "int32 [tokens, top_k]",
        "offsets": "int32 [experts]",
        "experts": "experts >= 1",
        "input": "T [tokens * top_k, features]",
        "output": "T [tokens, features]",
        "probs": "stat(T) [tokens, top_k]",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "probs"),
        outputs=("output",),
        saves=("input", "probs", "positions", "offsets"),
        saved_for={"input": "probs"},
        reference=_backward,
    ),
    triton="fusedops.kernels.moe_unpermute",
    shard=_shard,
)
