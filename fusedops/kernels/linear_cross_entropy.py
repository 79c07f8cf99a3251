"""linear_cross_entropy and linear_token_logprobs on a GPU.

Products per chunk of classes, and cross_entropy's kernels between them. The logits of a chunk are
float32, also of half-precision factors: the products write their sums unrounded. Ignored rows are
computed like others, with gradient 0: to skip them, the host would have to wait for their count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusedops.kernels import _launch
from fusedops.kernels._arguments import LinearLossArguments, LinearTokenArguments, of_backward
from fusedops.kernels.cross_entropy import Pieces, dense_matrix, logits_gradient, row_gradients


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = LinearLossArguments(*args)
    with _launch.device_of(call.hidden):
        pieces, kept = sums(call)
        return *pieces.finish(call.target.shape, call.reduction), kept


def backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    (grad_loss,), call, saved, output_mask = of_backward(LinearLossArguments, args)
    return gradients(row_gradients(grad_loss, call.reduction), call, saved, output_mask)


def sums(
    call: LinearLossArguments | LinearTokenArguments, *, tokens: bool = False
) -> tuple[Pieces, torch.Tensor]:
    """Return the sums of the rows, and the logits if they are kept."""
    x, num_classes = dense_matrix(call.hidden), call.weight.shape[0]
    chunk_size = num_classes if call.keep_logits else call.chunk_size
    form: dict[str, Any] = {"several": num_classes > chunk_size, "all_classes": call.num_classes}
    pieces = Pieces(call.target.reshape(-1), num_classes, call.options, tokens=tokens, **form)
    for chunk in _chunks(num_classes, chunk_size):
        logits = _logits(x, call.weight, call.bias, chunk)
        pieces.add(logits, chunk.start)
    kept = logits if call.keep_logits else logits.new_empty((x.shape[0], 0))
    return pieces, kept.view(*call.target.shape, kept.shape[1])


def gradients(
    grad_rows: torch.Tensor,
    call: LinearLossArguments | LinearTokenArguments,
    saved: Sequence[Any],
    output_mask: Sequence[bool],
    *,
    tokens: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias from those of the rows.

    ``saved``: statistics and logits, as the forward returned them.
    """
    (statistics, kept), hidden, weight = saved, call.hidden, call.weight
    x, num_classes = dense_matrix(hidden), weight.shape[0]
    grad_hidden: torch.Tensor | None = None
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    grad_bias = weight.new_empty(num_classes)
    with _launch.device_of(x):
        for chunk in _chunks(num_classes, call.chunk_size):
            if call.keep_logits:
                logits = kept.view(x.shape[0], num_classes)[:, chunk].clone()
            else:
                logits = _logits(x, weight, call.bias, chunk)
            grad = logits if x.dtype == torch.float32 else torch.empty_like(logits, dtype=x.dtype)
            arguments = (grad_rows, logits, call.target.reshape(-1), statistics.contiguous(), grad)
            classes = (num_classes, call.num_classes, chunk.start)
            logits_gradient(*arguments, *classes, options=call.options, tokens=tokens)
            if output_mask[0]:
                grad_hidden = float32_product(grad, weight[chunk], add=grad_hidden)
            if output_mask[1]:
                torch.mm(grad.t(), x, out=grad_weight[chunk])
            if output_mask[2]:
                grad_bias[chunk] = grad.sum(0, dtype=torch.float32)
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype).view(hidden.shape),
        grad_weight if output_mask[1] else None,
        grad_bias if output_mask[2] else None,
    )


def _chunks(num_classes: int, chunk_size: int) -> Iterator[slice]:
    for first in range(0, num_classes, chunk_size):
        yield slice(first, min(first + chunk_size, num_classes))


def _logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: slice
) -> torch.Tensor:
    logits = float32_product(x, weight[chunk].t())
    return logits if bias is None else logits.add_(bias[chunk])


def float32_product(
    a: torch.Tensor, b: torch.Tensor, add: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 product, added to ``add`` (which may be overwritten)."""
    if a.dtype == torch.float32 or not a.is_cuda:  # not CUDA: Triton's interpreter
        product = a.float() @ b.float()
    elif add is not None:
        return torch.addmm(add, a, b, out_dtype=torch.float32)
    else:
        return torch.mm(a, b, out_dtype=torch.float32)
    return product if add is None else add.add_(product)
