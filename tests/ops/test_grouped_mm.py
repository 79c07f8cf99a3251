"""What is special about grouped_mm: rows of nobody, blocked sizes, gradients in a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

import fusedops

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def _ends(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)


def _leaves(
    sizes: Sequence[int], depth: int, columns: int, dtype: torch.dtype, tail: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sum(sizes) + tail, depth, generator=generator)
    weight = torch.randn(len(sizes), columns, depth, generator=generator) * depth**-0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).mT.requires_grad_()


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nobody_are_never_read(backend: str, dtype: torch.dtype) -> None:
    sizes = (3, 0, 5)
    x, weight = _leaves(sizes, 8, 6, dtype, tail=4)
    bias = torch.ones(3, 6, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        x[8:] = float("nan")
    with fusedops.use_backend(backend):
        output = fusedops.grouped_mm(x, weight, _ends(sizes), bias, activation="silu")
        grad = torch.ones_like(output)
        grad[8:] = float("nan")
        grads = torch.autograd.grad(output, (x, weight, bias), grad)
    assert torch.equal(output[8:], torch.zeros(4, 6, dtype=dtype))
    assert torch.equal(grads[0][8:], torch.zeros(4, 8, dtype=dtype))
    assert not any(each.isnan().any() for each in (output, *grads))
    assert torch.equal(grads[1][1], torch.zeros(8, 6, dtype=dtype))
    assert torch.equal(grads[2][1], torch.zeros(6, dtype=dtype))
