"""Results depend on the values of the operands alone: not on strides, not on what memory held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from reachable import reachable
from torch.utils import deterministic

import fusedops
from fusedops._core.generators import seed_generators
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import fresh, incoming, run

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def each_sample(*dtypes: torch.dtype, with_one: bool = False) -> Any:
    """Run a test with every sample, or with those that have a dim of one element."""
    chosen = [
        pytest.param(spec, sample, id=f"{spec.name}-{sample.name}-{str(dtype)[6:]}")
        for spec in all_specs().values()
        for dtype in dtypes
        for sample in spec.samples(CPU, dtype)
        if not with_one or any(1 in tensor.shape for tensor in sample.tensors)
    ]
    return pytest.mark.parametrize(("spec", "sample"), chosen)


def with_odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with strides that say nothing, those of dims of one element, changed."""
    strides = [
        stride if size > 1 else 3
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    odd = tensor.detach().clone().as_strided(tensor.shape, strides)
    return odd.requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
@each_sample(torch.float32, with_one=True)
def test_strides_of_dims_of_one_element_say_nothing(
    spec: Spec, sample: Sample, backend: str
) -> None:
    dense = fresh(sample).map(lambda t: t.detach().contiguous().requires_grad_(t.requires_grad))
    call = dense.map(with_odd_strides)
    with fusedops.use_backend(backend), reachable(call.tensors):
        odd = run(
            spec.op,
            call,
            lambda outputs: [with_odd_strides(grad) for grad in incoming(outputs)],
        )
    with fusedops.use_backend(backend):
        assert_same_bits(odd, run(spec.op, dense))


@pytest.fixture
def uninitialized_memory_is_nan() -> Iterator[None]:
    """New tensors, and the kernels' workspaces, are full of NaN."""
    assert deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@each_sample(*DTYPES)
def test_nothing_is_read_that_was_not_written(
    spec: Spec, sample: Sample, uninitialized_memory_is_nan: None
) -> None:
    with fusedops.use_backend("cpp"):
        poisoned = run(spec.op, fresh(sample))
        torch.use_deterministic_algorithms(False)
        assert_same_bits(poisoned, run(spec.op, fresh(sample)))


def test_blocks_of_queries_without_keys_read_nothing(uninitialized_memory_is_nan: None) -> None:
    seed_generators(3)
    query, key, value = (torch.randn(1, 2, rows, 16) for rows in (160, 56, 56))
    sinks = torch.tensor([-104.0, 0.3], requires_grad=True)
    with fusedops.use_backend("cpp"):
        output, lse = fusedops.attention(
            query, key, value, window=(0, 0), sinks=sinks, return_lse=True
        )
        (grad,) = torch.autograd.grad(lse[:, :, 56:].sum(), sinks)
    assert torch.equal(lse[0, :, 56:], sinks.detach()[:, None].expand(2, 104))
    assert torch.equal(output[:, :, 56:], torch.zeros(1, 2, 104, 16))
    assert torch.equal(grad, torch.full((2,), 104.0))
