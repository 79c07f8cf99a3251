"""moe_permute: copies each token's row to its experts, sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core.library import Gradient, define_op
from fusedops.ops import _moe_math as formulas
from fusedops.ops._routing_plan import RoutingPlan


def moe_permute(input: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Copy each token's row to the rows of its experts.

    ``output[r] = input[plan.permutation[r] // top_k]`` for the rows ``r < plan.offsets[-1]``, and
    zeros after them. Rows are token-major: sorted by expert, within an expert by token
    (``moe_relayout`` makes other layouts of them).

    Args:
        input: ``[tokens, hidden]``, any floating dtype; the stride between rows is arbitrary.
        plan: of the same tokens.

    Returns:
        ``[tokens * top_k, hidden]``, dtype of ``input``, contiguous: the rows of expert ``e`` are
        ``output[offsets[e - 1] : offsets[e]]``.

    Raises:
        ValueError: plan and input do not fit; (CPU) a position of the plan is not a row.
        TypeError: an argument is no tensor or no plan, or its dtype does not fit.

    Note:
        Copies bits. The gradient of a token is the sum of its kept rows' gradients, in slot order,
        in float32 (float64 for float64), rounded once; gradients of dropped rows are not read.
        Reads a token once, writes its ``top_k`` rows. Saves index tensors only; twice
        differentiable. Columns may be sharded. Autocast does not change the call.

    Reference:
        Gale et al.: MegaBlocks, arXiv:2211.15841.

    Example:
        >>> import torch, fusedops
        >>> ids = torch.tensor([[1, 0], [1, 2]])
        >>> plan = fusedops.RoutingPlan.from_choices(ids, torch.ones(2, 2), num_experts=3)
        >>> fusedops.moe_permute(torch.tensor([[1.0], [2.0]]), plan).flatten()
        tensor([1., 1., 2., 2.])
    """
    formulas.check("moe_permute", input, plan, of_tokens=True)
    return _OP(input, plan.positions, plan.offsets)


def _reference(input: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    formulas.check_places("moe_permute", positions, offsets)
    return formulas.scatter(input, None, positions, offsets)


def _backward(*args: Any) -> torch.Tensor | None:
    grad_output, positions, offsets, output_mask = args
    return formulas.combine(grad_output, None, positions, offsets) if output_mask[0] else None


_OP = define_op(
    "moe_permute",
    "(Tensor input, Tensor positions, Tensor offsets) -> (Tensor output)",
    contract={
        "positions": "int32 [tokens, top_k]",
        "offsets": "int32 [experts]",
        "experts": "experts >= 1",
        "input": "T [tokens, features]",
        "output": "T [tokens * top_k, features]",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input",), outputs=("output",), saves=("positions", "offsets"), reference=_backward
    ),
    triton="fusedops.kernels.moe_permute",
    shard=formulas.shard_columns,
    shard_backward=formulas.shard_columns,
)
