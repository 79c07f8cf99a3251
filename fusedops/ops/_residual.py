"""What the ops that add to a residual stream say alike: checks, dtypes, dropout, the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._core import checks, dtypes, philox, sharding
from fusedops._core.sharding import REPLICATE, Sharding
from fusedops.ops._norm_math import row_placements

_HALF = (torch.bfloat16, torch.float16)


def check(op: str, input: Any, residual: Any, argument: str, p: Any, training: Any) -> torch.dtype:
    """Raise unless ``input`` can be added to ``residual``, dropped with probability ``p``.

    Returns the dtype of the sum.
    """
    checks.tensor(op, "input", input)
    if not checks.alike(residual, input.dtype, input.device):
        checks.like(op, "residual", residual, "input", input)
    if residual.shape != input.shape:
        checks.shape(op, "residual", residual, input.shape, "the shape of input")
    checks.probability(op, argument, p)
    checks.flag(op, "training", training)
    if residual.dtype == input.dtype:
        return input.dtype
    return torch.promote_types(residual.dtype, input.dtype)


def is_plain(
    input: Any, residual: Any, normalized_shape: Any, p: Any, training: Any, seed: Any
) -> bool:
    """Whether the op can be called directly: one size and dtype, no dropout, no GPU autocast.

    The op's contract checks everything else. Checks here took a third of a call of 16 rows.
    """
    return (
        type(p) is float
        and p == 0.0
        and type(normalized_shape) is tuple
        and len(normalized_shape) == 1
        and type(normalized_shape[0]) is int
        and (training is True or training is False)
        and seed is None
        and isinstance(input, torch.Tensor)
        and isinstance(residual, torch.Tensor)
        and input.dtype == residual.dtype
        and not (input.is_cuda and torch.is_autocast_enabled("cuda"))
    )


def promote(
    input: torch.Tensor, residual: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the dtypes that kernels take for a sum of ``dtype``.

    That is ``dtype``, except that a half-precision ``input`` of a float32 sum is unchanged: under
    autocast, a linear's output is added to a float32 stream. Kernels read it without a copy.
    """
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALF):
        input = input.to(dtype)
    return input, residual if residual.dtype == dtype else residual.to(dtype)


def is_promoted(residual: Any, input_dtype: Any) -> bool:
    """Return whether the op's function has cast an argument of the operator."""
    return isinstance(residual, torch.Tensor) and residual.dtype != input_dtype


def draw_seed(
    op: str, input: torch.Tensor, p: float, training: bool, seed: torch.Tensor | None
) -> tuple[torch.Tensor | None, float]:
    """Return the seed and the probability that the op receives: ``(None, 0.0)`` without dropout."""
    if seed is not None:
        philox.check_seed(op, seed, input.device)
    if not training or p == 0.0:
        return None, 0.0
    return philox.new_seed(input.device) if seed is None else seed, float(p)


def add(
    input: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None, p: float
) -> torch.Tensor:
    """Return ``residual + dropout(input)`` in the dtype of ``residual``, rounded once."""
    wide = dtypes.statistics_dtype(residual.dtype)
    total = residual.to(wide) + philox.dropout(input.to(wide), seed, p)
    return total.to(residual.dtype).contiguous()


def computed_gradients(
    grad_normed: Any,
    summed: Any,
    dropout_p: float,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> tuple[bool, ...]:
    """Return which gradients the backward of sum and norm computes, of those asked for.

    Of input, residual and the norm's parameters. Not what is the same: without dropout and cast,
    ``input`` has the gradient of ``residual``; nor what is nothing: without ``grad_normed`` the
    parameters have none.
    """
    same_dtype = input_dtype == sharding.meta(summed).dtype
    same = output_mask[1] and philox.threshold(dropout_p) == 0 and same_dtype
    has_normed = grad_normed is not None
    parameters = (needed and has_normed for needed in output_mask[2:])
    return (output_mask[0] and not same, output_mask[1], *parameters)


def backward(
    grads: Sequence[torch.Tensor | None],
    summed: torch.Tensor,
    seed: torch.Tensor | None,
    numbers: Sequence[Any],
    norm_gradients: Callable[[torch.Tensor, Sequence[bool]], list[torch.Tensor | None]],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, residual and the norm's parameters.

    Args:
        grads: of ``normed`` and of ``summed``.
        summed: an output, but not a constant: autograd knows how it depends on the inputs.
        seed: of dropout.
        numbers: ``dropout_p``, ``input_dtype`` and ``output_mask``.
        norm_gradients: returns, from that of ``normed``, the gradients of the sum and of the
            parameters that are asked for.
    """
    grad_normed, grad_summed = grads
    dropout_p, input_dtype, output_mask = numbers
    needs = computed_gradients(grad_normed, summed, dropout_p, input_dtype, output_mask)
    total = torch.zeros_like(summed, dtype=dtypes.statistics_dtype(summed.dtype))
    parameters: list[torch.Tensor | None] = [None] * len(needs[2:])
    grad_input = grad_residual = None
    if grad_normed is not None:
        of_sum, *parameters = norm_gradients(grad_normed, (needs[0] or needs[1], *needs[2:]))
        total = total if of_sum is None else of_sum
    if grad_summed is not None:
        total = total + grad_summed.to(total.dtype)
    if needs[0]:
        grad_input = philox.dropout(total, seed, dropout_p).to(input_dtype).contiguous()
    if needs[1]:
        grad_residual = total.to(summed.dtype).contiguous()
    return grad_input, grad_residual, *parameters


def shard_backward(
    summed: Any, normalized_shape: Sequence[int], seed: Any, parameters: int
) -> list[Sharding]:
    """Return the rule of the backward of a norm that saves as many statistics as parameters.

    With rows sharded, each rank has a part of the sums that are the parameter gradients.
    """
    rules: list[Sharding] = []
    for dim in row_placements(summed, normalized_shape, seed):
        partial = sharding.of_gradient(REPLICATE, sharded=dim != REPLICATE)
        inputs = [dim, dim, dim, REPLICATE, *[dim] * parameters, REPLICATE]
        rules.append(([dim, dim, *[partial] * parameters], inputs))
    return rules
