"""Assertions over ``fusedops.specs.comparison``, for the tests of the ops."""

from __future__ import annotations

import torch

from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import ComparisonResult, difference, difference_from_truth


def assert_within_budget(actual: ComparisonResult, spec: Spec, sample: Sample) -> None:
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
