"""The loops of ``mlp_tiled`` over tiles of rows, for its reference and its Triton kernels.

Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedops._core.layouts import as_matrix


def forward(args: tuple[Any, ...], layer: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return what ``layer`` returns for the rows of each tile and the other arguments."""
    input, *others, tile_tokens = args
    x, columns = as_matrix(input), others[3].shape[0]
    output = x.new_empty(x.shape[0], columns)
    for tile in _tiles(x.shape[0], tile_tokens):
        output[tile] = layer(x[tile], *others)
    return output.view(*input.shape[:-1], columns)


def backward(
    args: tuple[Any, ...], tile_gradients: Callable[..., tuple[torch.Tensor | None, ...]]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, of which ``tile_gradients`` returns those of a tile.

    It gives those of parameters in the dtype of sums: the sum over the tiles is rounded once.
    """
    grad_output, input, *others, tile_tokens, output_mask = args
    x, dy = as_matrix(input), as_matrix(grad_output)
    # A second derivative differentiates this: all rows are one tile then.
    rows = x.shape[0] if torch.is_grad_enabled() else tile_tokens
    is_one = rows >= x.shape[0]
    grad_input = x.new_empty(x.shape) if output_mask[0] and not is_one else None
    sums: list[torch.Tensor | None] = [None] * 5
    for tile in [slice(None)] if is_one else _tiles(x.shape[0], rows):
        part, *grads = tile_gradients(dy[tile].contiguous(), x[tile], *others, output_mask)
        if is_one:
            grad_input = part
        elif grad_input is not None and part is not None:
            grad_input[tile] = part
        for place, grad in enumerate(grads):
            total = sums[place]
            sums[place] = grad if total is None or grad is None else total.add_(grad)
    return None if grad_input is None else grad_input.reshape(input.shape), *(
        None if total is None else _like(total, parameter)
        for total, parameter in zip(sums, others, strict=False)
    )


def _tiles(rows: int, tile_tokens: int) -> Iterator[slice]:
    return (slice(first, first + tile_tokens) for first in range(0, rows, tile_tokens))


def _like(total: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a sum in the dtype of a parameter, laid out as it is."""
    total = total.to(parameter.dtype)
    if not parameter.is_contiguous() and parameter.mT.is_contiguous():
        return total.t().contiguous().t()
    return total.contiguous()
