"""How tests compare tensors: to the bit, or within the error budget of float64's result.

``fusedops.specs.comparison`` has the budgets and words the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import ComparisonResult, difference, difference_from_truth, run


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, in the order of its dims."""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return dense.flatten().view(torch.uint8)


def assert_same_bits(got: Any, want: Any, where: str = "") -> None:
    """Compare tensors, or whatever holds tensors, bit for bit: NaN and the sign of 0 count too."""
    if isinstance(want, ComparisonResult):
        got, want = [*got.outputs, *got.grads], [*want.outputs, *want.grads]
    if isinstance(want, torch.Tensor):
        kinds = [(each.dtype, each.shape) for each in (got, want)]
        assert kinds[0] == kinds[1], f"{where}: {kinds[0]}, wanted {kinds[1]}"
        if not torch.equal(bits(got), bits(want)):
            error = (got.double() - want.double()).abs()
            count, most = int((error != 0).sum()), error.max()
            raise AssertionError(f"{where}: {count} elements differ, by up to {most}")
    elif isinstance(want, Mapping):
        assert list(got) == list(want), where
        for key in want:
            assert_same_bits(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for place, pair in enumerate(zip(got, want, strict=True)):
            assert_same_bits(*pair, f"{where}[{place}]")
    else:
        assert got == want, where


def assert_same_bits_on_threads(spec: Spec, sample: Sample, counts: Sequence[int]) -> None:
    """Run a call on each number of threads, and compare the results bit for bit."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run(spec.op, sample))
    finally:
        torch.set_num_threads(threads)
    for count, result in zip(counts, results, strict=True):
        assert_same_bits(result, results[0], f"{count} threads")


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    base: torch.Tensor,
    name: str = "result",
    depth: int = 1,
) -> None:
    """Compare one tensor with its truth; ``base`` is what eager torch gets in the same dtype."""
    found = difference(got, want.double(), base, depth)
    assert found is None, f"{name}: {found}"


def assert_all_close(
    got: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    want: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    base: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    depth: int = 1,
) -> None:
    """Compare each of several tensors as ``assert_close`` does, by place or by name."""
    if isinstance(got, Mapping):
        assert got.keys() == want.keys()
    assert len(got) == len(want) == len(base)
    for key in got if isinstance(got, Mapping) else range(len(got)):
        assert_close(got[key], want[key], base[key], f"result {key}", depth)


def assert_within_budget(actual: ComparisonResult, spec: Spec, sample: Sample) -> None:
    """Compare every output and gradient of a call with the truth, within the error budget."""
    found = difference_from_truth(actual, spec, sample)
    assert found is None, found
