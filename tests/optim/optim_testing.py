"""What the tests of optimizers share: models of odd shapes, gradients, and runs to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

# A bias, a chunk and a bit, several chunks, nothing, one element.
SHAPES = ((7,), (3, 5, 2), (129, 131), (40000,), (0, 4), ())


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """Return the same parameters at each call."""
    made = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def set_gradients(params: Iterable[torch.Tensor], step: int, scale: float = 1.0) -> None:
    """Give parameters the gradients of a step: the same values in every dtype, but for rounding."""
    made = torch.Generator().manual_seed(1000 + step)
    for param in params:
        drawn = torch.randn(param.shape, generator=made, dtype=torch.float64) * scale
        # Of any size, as gradients are; multiples of bfloat16's spacing, so that dtypes agree.
        drawn = drawn * torch.exp2(torch.randint(-12, 4, param.shape, generator=made).double())
        param.grad = drawn.bfloat16().to(param.dtype)


def run(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.Tensor]:
    """Return the parameters after some steps of an optimizer."""
    params = parameters(dtype, shapes)
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return [param.detach() for param in params]
