"""Scale, mask and softmax in one pass, from attention scores to probabilities."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import PARTIAL, REPLICATE, Placement, Sharding


def scaled_masked_softmax(
    input: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """Scale and mask the last dimension and apply softmax to it.

    ``y = exp(s - max(s)) / sum(exp(s - max(s)))``, ``s = scale * x + mask``

    Args:
        input: ``[..., queries, keys]``, any floating dtype, any strides.
        mask: any shape that broadcasts to that of ``input``, and is never expanded in memory.
            Boolean: ``True`` keeps an element, as in ``scaled_dot_product_attention`` (Megatron's
            masks mean the opposite). Floating: added to the scaled input; dtype of ``input``
            (float32 is also accepted if that is a half-precision dtype).
        scale: factor of ``input``.
        is_causal: query ``i`` sees keys ``0 .. i``, as in ``scaled_dot_product_attention``: aligned
            to the upper left where there are more keys than queries. May be combined with a mask.

    Returns:
        Shape and dtype of ``input``, contiguous. A row whose elements are all masked (or ``-inf``)
        is 0, and so is its gradient.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: an argument is no tensor or number, or its dtype does not fit.

    Note:
        Arithmetic is float32 (float64 for float64); the result is rounded once. Only ``False`` and
        ``-inf`` mask: a row filled with the least finite number, as in some models' masks, is a row
        of equal scores. A row's result does not depend on the other rows; the gradient of an
        additive mask is summed over the broadcast dimensions in a fixed order: the same bits for
        any number of threads. Saves the rounded result, from which the gradients (also of a float32
        mask) are computed, and the mask. Autocast does not change the call.

    Reference:
        Milakov, Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867.

    Example:
        >>> import torch, fusedops
        >>> fusedops.scaled_masked_softmax(torch.zeros(2, 2), is_causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    _check(input, mask, scale, is_causal)
    return _OP(input, mask, scale, is_causal)


def _check(input: Any, mask: Any, scale: Any, is_causal: Any) -> None:
    op = "scaled_masked_softmax"
    checks.tensor(op, "input", input)
    if input.dim() < 2:
        checks.fail(op, "input", "of at least 2 dimensions", f"{input.dim()}")
    checks.number(op, "scale", scale)
    checks.flag(op, "is_causal", is_causal)
    if mask is None:
        return
    checks.tensor(op, "mask", mask, floating=False)
    if mask.dtype == torch.bool:
        if mask.device != input.device:
            checks.fail(op, "mask", f"on {input.device}, the device of input", mask.device)
    else:
        checks.parameter(op, "mask", mask, "input", input)
    fits = mask.dim() <= input.dim() and all(
        size in (1, full)
        for size, full in zip(reversed(mask.shape), reversed(input.shape), strict=False)
    )
    if not fits:
        expected = f"of a shape that broadcasts to that of input, {list(input.shape)}"
        checks.fail(op, "mask", expected, list(mask.shape))


def _reference(
    input: torch.Tensor, mask: torch.Tensor | None, scale: float, is_causal: bool
) -> torch.Tensor:
    scores = input.to(dtypes.statistics_dtype(input.dtype)) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -torch.inf)
    if scores.numel() == 0:
        return input.new_empty(input.shape)
    peak = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - peak.masked_fill(peak == -torch.inf, 0.0))
    total = e.sum(-1, keepdim=True)
    return (e / total.masked_fill(total == 0.0, 1.0)).to(input.dtype).contiguous()


def _backward(*args: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad_output, mask, output, scale, _, output_mask = args
    # `output` is differentiable itself, so this is the second derivative too. Its sum is 1 but for
    # its rounding, which would count times grad and not times a difference of grads.
    y = output.to(dtypes.statistics_dtype(output.dtype))
    grad = grad_output.to(y.dtype)
    total = y.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0.0, 1.0)
    grad = y * (grad - (y * grad).sum(-1, keepdim=True) / total)
    grad_input = grad_mask = None
    if output_mask[0]:
        grad_input = (grad * scale).to(output.dtype).contiguous()
    if output_mask[1]:
        assert mask is not None
        summed = grad.sum_to_size(mask.shape).to(mask.dtype)
        grad_mask = torch.clone(summed, memory_format=torch.contiguous_format)
    return grad_input, grad_mask


def _cuts(scores: Any, mask: Any, is_causal: bool) -> list[tuple[Placement, Placement, Placement]]:
    """Return placements of the scores, of the mask and of the mask's gradient.

    Rows are independent; causality needs to know which query a row is.
    """
    cuts: list[tuple[Placement, Placement, Placement]] = [(REPLICATE, REPLICATE, REPLICATE)]
    for dim in range(scores.ndim - (2 if is_causal else 1)):
        of_mask = -1 if mask is None else dim - (scores.ndim - mask.ndim)
        if of_mask >= 0 and mask.shape[of_mask] != 1:
            cuts.append((dim, of_mask, of_mask))
        else:
            cuts.append((dim, REPLICATE, PARTIAL))
    return cuts


def _shard(input: Any, mask: Any, is_causal: bool) -> list[Sharding]:
    return [([dim], [dim, of_mask]) for dim, of_mask, _ in _cuts(input, mask, is_causal)]


def _shard_backward(mask: Any, output: Any, is_causal: bool) -> list[Sharding]:
    cuts = _cuts(output, mask, is_causal)
    return [([dim, summed], [dim, of_mask, dim]) for dim, of_mask, summed in cuts]


_OP = define_op(
    "scaled_masked_softmax",
    "(Tensor input, Tensor? mask, float scale, bool is_causal) -> (Tensor output)",
    contract={
        "input, output": "T [*shape]",
        "mask": "bool | param(T) [~...shape]",
        "shape": "len(shape) >= 2",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=("input", "mask"), outputs=("output",), saves=("mask", "output"), reference=_backward
    ),
    triton="fusedops.kernels.scaled_masked_softmax",
    shard=_shard,
    shard_backward=_shard_backward,
)
