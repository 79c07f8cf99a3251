"""How the generic tests run an op: on a backend, in float64 as the truth, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fusedops
from fusedops._core import dtypes
from fusedops.specs import Sample, Spec, tensors_in


@dataclass
class Result:
    """Outputs of a call, the tensors of a plan among them, and the gradients of its leaves."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tensors_in(value)


def floating(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs that must have a gradient: indices and counts have none."""
    return tuple(each for each in tensors_in(value) if each.is_floating_point())


def fresh(sample: Sample, dtype: torch.dtype | None = None) -> Sample:
    """Return the sample with new leaves, in another dtype if asked."""

    def renew(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().clone()
        if dtype is not None and new.is_floating_point():
            new = new.to(dtype)
        return new.requires_grad_(tensor.requires_grad)

    return sample.map(renew)


def incoming(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the incoming gradients: the same values for every backend and dtype."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(output.shape, generator=generator).bfloat16().to(output) for output in outputs
    ]


def run(function: Callable[..., Any], sample: Sample) -> Result:
    """Call ``function`` on the sample and differentiate all outputs with respect to all leaves."""
    torch.manual_seed(11)
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    leaves = sample.leaves
    wide = floating(outputs)
    grads = torch.autograd.grad(wide, leaves, incoming(wide)) if leaves else ()
    return Result([output.detach() for output in outputs], list(grads))


def truth(spec: Spec, sample: Sample) -> Result:
    """Run the sample in float64: eager torch, or the reference for a random call."""
    return baseline(spec, fresh(sample, torch.float64))


def baseline(spec: Spec, sample: Sample) -> Result:
    """Run the sample in eager torch in its own dtype; a random call on the reference."""
    if not sample.random:
        return run(spec.eager, sample)
    with fusedops.use_backend("torch"):
        return run(spec.op, sample)


def assert_within_budget(actual: Result, spec: Spec, sample: Sample) -> None:
    """Compare every output and gradient with the truth, within the error budget."""
    exact, eager = truth(spec, sample), baseline(spec, fresh(sample))
    depth = spec.depth(sample)
    assert len(depth.gradients) == len(actual.grads), "a depth for each leaf"
    inside = spec.inner_dtype(sample)
    names = [f"output {i}" for i in range(len(actual.outputs))]
    names += [f"gradient of leaf {i}" for i in range(len(actual.grads))]
    for name, terms, got, want, base in zip(
        names,
        [depth.outputs] * len(actual.outputs) + list(depth.gradients),
        actual.outputs + actual.grads,
        exact.outputs + exact.grads,
        eager.outputs + eager.grads,
        strict=True,
    ):
        assert got.shape == want.shape, f"{name}: shape {got.shape}, wanted {want.shape}"
        assert got.dtype == base.dtype, f"{name}: {got.dtype}, wanted {base.dtype}"
        if not got.is_floating_point():
            assert torch.equal(got, want), f"{name}: {got}, wanted {want}"
            continue
        assert_close(got, want, base, name, terms, inside)


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    base: torch.Tensor,
    name: str,
    depth: int = 1,
    inside: torch.dtype | None = None,
) -> None:
    """Compare one tensor with its truth; ``base`` is what eager torch gets in the same dtype.

    ``inside`` is the dtype of values that the result is made of, where it is not the result's.
    """
    budget = dtypes.error_budget(base, want, inside or got.dtype, depth=depth)
    error = (got.double() - want).abs()
    same = (got.double() == want) | (got.isnan() & want.isnan())
    excess = torch.where(same, torch.zeros_like(error), error - budget)
    wrong = (excess > 0) | (error.isnan() & ~same)
    if not wrong.any():
        return
    worst = torch.where(wrong, excess.nan_to_num(nan=math.inf), -math.inf).argmax()
    place = tuple(int(index) for index in torch.unravel_index(worst, got.shape))
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {got.numel()} elements are over the error budget; "
        f"the worst, {list(place)}, is {got[place]:.9g}, float64 has {want[place]:.9g}, eager "
        f"torch {base[place]:.9g}, allowed is an error of {budget[place]:.3g}"
    )
