"""Batched matrix product plus a scaled addend, ``torch.baddbmm`` for any leading dimensions.

The addend (a bias row, ALiBi slopes ``[H, 1, S]``) is never expanded in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding
from fusedops.ops.linear_act import empty_gradient, is_transposed


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Multiply matrices and add a scaled tensor.

    ``y = beta * input + alpha * (batch1 @ batch2)``

    Args:
        input: the addend, any shape that broadcasts to that of the result, any strides. It is not
            read where ``beta`` is 0: NaN in it is then ignored.
        batch1: ``[..., M, K]``, any floating dtype, any strides.
        batch2: ``[..., K, N]``, dtype of ``batch1``; leading dimensions broadcast with those of
            ``batch1`` as in ``torch.matmul``, and nothing is copied.
        beta: factor of ``input``.
        alpha: factor of the product.

    Returns:
        ``[..., M, N]``, dtype of ``batch1``, contiguous.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor, its dtype does not fit, or a factor is no number.

    Note:
        Products accumulate in float32 (float64 for float64), scale and addend act on the sums, and
        the result is rounded once. So is the gradient of a broadcast operand, which is summed in
        float32. On the CPU an element depends on its row, its column and its addend alone, and no
        result on the number of threads; this is not promised for bfloat16 on AMX, where torch
        multiplies dense batches. Saves ``batch1`` and ``batch2``; the addend is not saved.
        Under autocast all tensors are cast, as torch does for baddbmm.

    Reference:
        Press, Smith, Lewis: Train Short, Test Long (ALiBi), arXiv:2108.12409, for the addend
        ``[H, 1, S]`` of attention scores.

    Example:
        >>> import torch, fusedops
        >>> one = torch.ones(2, 1, 1)
        >>> fusedops.baddbmm(torch.tensor([[[1.0]], [[2.0]]]), one, one, alpha=3)
        tensor([[[4.]],
        <BLANKLINE>
                [[5.]]])
    """
    op = "baddbmm"
    shape = _check(op, input, batch1, batch2)
    checks.number(op, "beta", beta)
    checks.number(op, "alpha", alpha)
    rank = len(shape)
    batch1, batch2 = _with_rank(batch1, rank), _with_rank(batch2, rank)
    if input.shape == shape:
        broadcast = [0] * rank
    else:
        input = _with_rank(input, rank)
        pairs = zip(input.shape, shape, strict=True)
        # Numbers, because torch.jit.trace records no list of bools.
        broadcast = [int(size == 1 and full != 1) for size, full in pairs]
    return _OP(input, batch1, batch2, float(beta), float(alpha), broadcast)


def _check(op: str, input: Any, batch1: Any, batch2: Any) -> tuple[int, ...]:
    checks.tensor(op, "batch1", batch1)
    dtype, device = batch1.dtype, batch1.device
    for name, value in (("batch2", batch2), ("input", input)):
        if not checks.alike(value, dtype, device):
            same = dtypes.autocast_dtype(device) is None
            checks.like(op, name, value, "batch1", batch1, dtype=same)
    first, second = batch1.shape, batch2.shape
    if len(first) < 2 or len(second) < 2:
        name, got = ("batch1", first) if len(first) < 2 else ("batch2", second)
        checks.fail(op, name, "a tensor of at least two dimensions", f"shape {list(got)}")
    if first[-1] != second[-2]:
        expected = f"of shape [..., {first[-1]}, N] (batch1 has {first[-1]} columns)"
        checks.fail(op, "batch2", expected, list(second))
    leading: tuple[int, ...] | None
    if len(first) == len(second) == 3 and first[0] == second[0]:
        leading = (first[0],)
    else:
        leading = _broadcast(first[:-2], second[:-2])
    if leading is None:
        expected = f"such that leading dimensions broadcast with {list(first[:-2])} of batch1"
        checks.fail(op, "batch2", expected, list(second))
    shape = (*leading, first[-2], second[-1])
    sizes = input.shape
    if sizes != shape and (len(sizes) > len(shape) or _broadcast(sizes, shape) != shape):
        checks.fail(op, "input", f"a shape that broadcasts to {list(shape)}", list(sizes))
    return shape


def _broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that two shapes broadcast to, or ``None``."""
    rank = max(len(first), len(second))
    result = []
    padded = [(1,) * (rank - len(sizes)) + tuple(sizes) for sizes in (first, second)]
    for a, b in zip(*padded, strict=True):
        if a != b and a != 1 and b != 1:
            return None
        result.append(b if a == 1 else a)
    return tuple(result)


def _with_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a view with dimensions of size 1 in front, up to ``rank`` dimensions."""
    return tensor[(None,) * (rank - tensor.dim())] if tensor.dim() < rank else tensor


def _reference(*args: Any) -> torch.Tensor:
    input, batch1, batch2, beta, alpha, _ = args
    product = torch.matmul(batch1, batch2)
    wide = dtypes.statistics_dtype(product.dtype)
    result = alpha * product.to(wide)
    if beta != 0:
        result = result + beta * input.to(wide)
    return result.to(product.dtype).contiguous()


def _fake(batch1: torch.Tensor, batch2: torch.Tensor) -> torch.Tensor:
    leading = torch.broadcast_shapes(batch1.shape[:-2], batch2.shape[:-2])
    return batch1.new_empty((*leading, batch1.shape[-2], batch2.shape[-1]))


def _operand_gradient(
    first: torch.Tensor, second: torch.Tensor, operand: torch.Tensor, alpha: float
) -> torch.Tensor:
    wide = dtypes.statistics_dtype(operand.dtype)
    product = torch.matmul(first, second)
    gradient = (alpha * product.to(wide).sum_to_size(operand.shape)).to(operand.dtype)
    return gradient.mT.contiguous().mT if is_transposed(operand) else gradient.contiguous()


def _computed(
    beta: float, broadcast: Sequence[int], output_mask: Sequence[bool]
) -> tuple[bool, ...]:
    """Return which gradients differ from the incoming one."""
    return (output_mask[0] and (any(broadcast) or beta != 1), *output_mask[1:])


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, batch1, batch2, beta, alpha, broadcast, output_mask = args
    grad_input = None
    if _computed(beta, broadcast, output_mask)[0]:
        dims = [dim for dim, is_broadcast in enumerate(broadcast) if is_broadcast]
        wide = dtypes.statistics_dtype(grad_output.dtype)
        summed = grad_output.to(wide)
        summed = summed.sum(dims, keepdim=True) if dims else summed
        grad_input = (beta * summed).to(grad_output.dtype).contiguous()
    return (
        grad_input,
        _operand_gradient(grad_output, batch2.mT, batch1, alpha) if output_mask[1] else None,
        _operand_gradient(batch1.mT, grad_output, batch2, alpha) if output_mask[2] else None,
    )


def _backward_fake(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grad_output, batch1, batch2, beta, _, broadcast, output_mask = args
    grad_input = None
    if _computed(beta, broadcast, output_mask)[0]:
        sizes = zip(grad_output.shape, broadcast, strict=True)
        grad_input = batch1.new_empty([1 if is_broadcast else size for size, is_broadcast in sizes])
    return (
        grad_input,
        empty_gradient(batch1) if output_mask[1] else None,
        empty_gradient(batch2) if output_mask[2] else None,
    )


def _shard(batch1: Any, batch2: Any, broadcast: Sequence[int]) -> list[Sharding]:
    """Shard a batch dimension, the rows or the columns; or the sum, when the addend is a sum."""
    rows, columns = batch1.ndim - 2, batch1.ndim - 1

    def addend(dim: int) -> Placement:
        return REPLICATE if broadcast[dim] else dim

    rules: list[Sharding] = [
        ([REPLICATE], [REPLICATE, REPLICATE, REPLICATE]),
        ([rows], [addend(rows), rows, REPLICATE]),
        ([columns], [addend(columns), REPLICATE, columns]),
        ([PARTIAL], [PARTIAL, columns, rows]),
    ]
    for dim in range(rows):
        sizes = (batch1.shape[dim], batch2.shape[dim])
        first, second = (REPLICATE if size == 1 and max(sizes) > 1 else dim for size in sizes)
        rules.append(([dim], [addend(dim), first, second]))
    return rules


_OP = define_op(
    "baddbmm",
    "(Tensor input, Tensor batch1, Tensor batch2, float beta, float alpha, int[] broadcast)"
    " -> (Tensor output)",
    contract={
        "batch1": "T [*batches1, rows, inner]",
        "batch2": "T [*batches2, inner, columns]",
        "batches": "broadcast(batches1, batches2)",
        "output": "T [*batches, rows, columns]",
        "input": "T [~*batches, ~rows, ~columns]",
        "broadcast": "len(broadcast) == len(batches1) + 2",
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "batch1", "batch2"),
        outputs=("output",),
        saves=("batch1", "batch2"),
        reference=_backward,
        fake=_backward_fake,
        computed=_computed,
        aliases={"input": "grad_output"},
    ),
    autocast="lower",
    triton="fusedops.kernels.baddbmm",
    shard=_shard,
)
