"""What the tests of the ops share: assertions over ``fusedops.specs.comparison``, and a recorder."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import (
    Result,
    baseline,
    difference,
    difference_from_exact,
    difference_from_truth,
    fresh,
    run,
    truth,
)


class RecordOps(TorchDispatchMode):
    """Records the fusedops operators that a call reaches, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def difference_of_mixture(spec: Spec, sample: Sample) -> str | None:
    """Run a call of several dtypes and return where it is over its error budget, or ``None``.

    Eager torch has no counterpart of many such calls. The result must have the dtypes that the
    reference gives, and be no more wrong than eager torch is where all tensors have the least
    precise dtype among them, which inner values may have. The truth is eager torch in float64.
    """
    got = run(spec.op, sample)
    with fusedops.use_backend("torch"):
        reference = run(spec.op, fresh(sample))
    least = baseline(spec, fresh(sample, sample.least_dtype))
    base = Result(
        [
            narrow.to(like.dtype)
            for narrow, like in zip(least.outputs, reference.outputs, strict=True)
        ],
        [narrow.to(like.dtype) for narrow, like in zip(least.grads, reference.grads, strict=True)],
    )
    exact = truth(spec, sample)
    return difference_from_exact(got, exact, base, spec, sample, inside=sample.least_dtype)


def assert_within_budget(actual: Result, spec: Spec, sample: Sample) -> None:
    """Compare every output and gradient with the truth, within the error budget."""
    found = difference_from_truth(actual, spec, sample)
    assert found is None, found


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
    found = difference(got, want, base, depth, inside)
    assert found is None, f"{name}: {found}"
