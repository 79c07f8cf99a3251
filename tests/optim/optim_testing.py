"""What the tests of optimizers share: models of odd shapes, gradients, and runs to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fusedops._core import dtypes, env

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


def assert_within(
    actual: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
    *,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that each error is at most twice that of torch, and a rounding of each step."""
    for got, theirs, true in zip(actual, eager, truth, strict=True):
        true = true.double()
        budget = dtypes.error_budget(theirs, true, dtype, depth=steps)
        error = (got.double() - true).abs()
        assert bool((error <= budget).all()), f"{error.max()} of {budget.min()}"


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that tensors, or whatever holds tensors, are equal bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        both = (each.detach().contiguous().reshape(-1) for each in (actual, expected))
        assert torch.equal(*(each.view(torch.uint8) for each in both))
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for each, other in zip(actual, expected, strict=True):
            assert_same(each, other)
    else:
        assert actual == expected


def reachable(tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Tell the interpreter, where it runs, of tensors that kernels find in a table."""
    if not env.triton_interpreted():
        return contextlib.nullcontext()
    import triton_interpreter_strict

    return triton_interpreter_strict.reachable(tensors)
