"""Norms of many tensors: their value, that nothing but the values shows in it, inf and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from comparing import assert_same_bits
from optim_testing import parameters, set_gradients, values
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.optim import clip_grad_norm_, global_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_large_and_small_numbers_neither_overflow_nor_vanish() -> None:
    large = torch.full((3,), 3e38)
    assert global_norm([large]).item() == pytest.approx(large.double().norm().item())
    tiny = torch.full((5, 5), 1e-30)
    assert global_norm([tiny]).item() == pytest.approx(tiny.double().norm().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_one_element_that_is_not_finite_shows(
    value: float, dtype: torch.dtype, backend: str
) -> None:
    for place in (0, 130, 16384 + 7, 39999):
        given = values(parameters(dtype))
        given[3][place] = value
        with fusedops.use_backend(backend):
            norm = global_norm(given)
        assert norm.isnan() if math.isnan(value) else norm == float("inf")


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, theirs = parameters_with_gradient(), parameters_with_gradient()
    norm = clip_grad_norm_(ours, max_norm)
    stock = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    truth = global_norm([param.grad.double() for param in parameters_with_gradient()])
    assert abs(norm - truth) <= abs(stock.double() - truth)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        scaled = other.grad.double()
        budget = dtypes.error_budget(other.grad, scaled, torch.float32, depth=40000)
        assert bool(((mine.grad.double() - scaled).abs() <= budget).all())


def parameters_with_gradient() -> list[nn.Parameter]:
    params = parameters()
    set_gradients(params, 0)
    return params


def test_a_norm_that_is_not_finite_raises_if_asked_to_and_nothing_is_scaled() -> None:
    params = parameters_with_gradient()
    assert params[0].grad is not None
    params[0].grad[0] = float("nan")
    before = [param.grad.clone() for param in params if param.grad is not None]
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert_same_bits([param.grad for param in params], before)


def test_nothing_has_the_norm_zero_and_wrong_arguments_are_named() -> None:
    assert global_norm([]) == 0.0 and global_norm([torch.zeros(0)]) == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([], 1.0, norm_type=1.0)
    with pytest.raises(TypeError, match="tensors.*int64"):
        global_norm([torch.ones(2, dtype=torch.int64)])
