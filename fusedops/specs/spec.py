"""The description of an op that drives its tests, its benchmark rows and its page.

A spec holds facts, no test and no timing code: ``tests/ops/test_all_ops.py``, ``fusedops bench``
and ``docs/gen_ops.py`` read it. One spec per file, named ``SPEC``, file name = op name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusedops.specs.make import TensorFactory

# What an op returns: a tensor, or several in a tuple or another pytree (a RoutingPlan).
Tensors = Any


@dataclass(frozen=True)
class Sample:
    """One call: ``op(*args, **kwargs)``.

    An argument may be a pytree with tensors in it, as a ``RoutingPlan`` is. Floating tensors in
    ``args`` and ``kwargs`` that require a gradient are the ones that the gradient tests
    differentiate. A ``random`` call draws numbers (dropout with p > 0): its truth is
    then the reference backend in float64 after the same ``torch.manual_seed``, not ``eager``.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order of the call."""
        return tensors_in((self.args, tuple(self.kwargs.values())))

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that require a gradient, in the order of the call."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    @property
    def least_dtype(self) -> torch.dtype | None:
        """The floating dtype of the least precision among the tensors, if there is one."""
        dtypes = {tensor.dtype for tensor in self.tensors if tensor.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """Return the call with every tensor replaced by ``change(tensor)``."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs)))
        return Sample(self.name, args, kwargs, self.random)


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a pytree (a tensor, tuple, plan ...), in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class BadInput:
    """One call that must raise ``error`` with every string of ``mentions`` in its message."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    error: type[Exception]
    mentions: tuple[str, ...]


def bad_changes(**call: Any) -> Callable[..., BadInput]:
    """Return a function that makes bad inputs from a valid call by changing its arguments.

    ``call`` has the positional arguments, in order; other changes are passed by keyword.
    """

    def changed(
        name: str, *mentions: str, error: type[Exception] = ValueError, **changes: Any
    ) -> BadInput:
        args = tuple(changes.pop(key, value) for key, value in call.items())
        return BadInput(name, args, changes, error, mentions)

    return changed


@dataclass(frozen=True)
class BenchCase:
    """One benchmark row: a size and how to make its inputs."""

    label: str  # the size as a reader writes it, for example ``"4096x1024"``
    # ``make(device, dtype)`` returns the sample to run; its tensors are random
    make: Callable[[torch.device, torch.dtype], Sample]
    # Least bytes that the forward moves through memory, given the dtype
    bytes_forward: Callable[[torch.dtype], int]
    bytes_backward: Callable[[torch.dtype], int]  # the same for the backward
    flops_forward: int = 0  # floating-point operations of the matrix products of the forward, or 0
    flops_backward: int = 0  # the same for the backward
    # Whether the row is in the default run (the others run with ``--all-sizes``)
    headline: bool = True

    @classmethod
    def moving(
        cls,
        label: str,
        arguments: Callable[[TensorFactory], Any],
        elements: tuple[int, int],
        flops: tuple[int, int] = (0, 0),
        extra: tuple[int, int] = (0, 0),
    ) -> BenchCase:
        """Return a row whose forward and backward move so many elements and ``extra`` bytes.

        ``arguments(new)`` returns those of the call, or a sample.
        """

        def make(device: torch.device, dtype: torch.dtype) -> Sample:
            made = arguments(TensorFactory(device, dtype))
            return made if isinstance(made, Sample) else Sample("bench", made)

        def moved(count: int, more: int) -> Callable[[torch.dtype], int]:
            return lambda dtype: count * dtype.itemsize + more

        forward, backward = map(moved, elements, extra)
        return cls(label, make, forward, backward, *flops, headline=False)

    def headlined(self) -> BenchCase:
        """Return the row as one of the default run."""
        return replace(self, headline=True)


@dataclass(frozen=True)
class Depth:
    """How many terms are summed into one element."""

    outputs: int  # of any output
    gradients: tuple[int, ...]  # of the gradient of each leaf of the sample, in their order


def same_arguments(
    input: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an op that has those of its OpInfo (``Spec.from_opinfo``)."""
    return (input, *args), kwargs


def all_elements(sample: Sample) -> Depth:
    """Return the depth of an op that may sum whatever it is given: the size of the largest leaf."""
    terms = max((leaf.numel() for leaf in sample.leaves), default=1)
    return Depth(terms, (terms,) * len(sample.leaves))


@dataclass(frozen=True)
class Spec:
    """What tests, benchmarks and documentation need to know of one op."""

    name: str  # the op's name; file names, dispatcher name and documentation page follow it
    op: Callable[..., Tensors]  # the public function
    # What a user writes today in eager torch, same signature; in float64 it is the reference of the
    # value tests, in the sample's dtype the baseline of benchmarks
    eager: Callable[..., Tensors]
    # ``samples(device, dtype)`` gives small and odd calls (empty, one element, odd sizes, optional
    # arguments absent, high-rank); floating tensors require gradients
    samples: Callable[[torch.device, torch.dtype], list[Sample]]
    # ``bad_inputs(device)`` gives calls that must raise
    bad_inputs: Callable[[torch.device], list[BadInput]]
    bench_cases: tuple[BenchCase, ...]  # rows of the benchmark
    summary: str  # one line for the README's table
    autocast: str  # what autocast does to the op, in one word of ``_core/dtypes.py``
    # Makes a row of any size; its parameters are the dimensions by which ``fusedops bench --shape``
    # takes one
    bench_case: Callable[..., BenchCase] | None = None
    # Where NaN and infinities make a difference, the eager functions that say how, a result being
    # what one of them gives; by default ``eager`` alone. Needed where that is a kernel of torch's
    # that loses NaN, and for what an op promises beyond torch.
    non_finite: tuple[Callable[..., Tensors], ...] = ()
    opinfo: tuple[str, ...] = ()  # names of the torch OpInfo entries that describe the same op
    # Turns an OpInfo sample ``(input, args, kwargs)`` into ``(args, kwargs)`` of ``op``, or
    # ``None`` when that sample means something that ``op`` does not offer; by default they are the
    # same
    from_opinfo: Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None] = same_arguments
    # Whether the result of a row (an index of the first dim of ``args[0]``) depends on that row of
    # the arguments alone
    rows_are_independent: bool = True
    # How many terms are summed into an element of an output and of a gradient, which the error
    # budget grows with (rules: ``specs/depth.py``)
    depth: Callable[[Sample], Depth] = all_elements
    # Whether the kernels round values between their products to the dtype of the inputs, so that a
    # float32 result of bfloat16 inputs (the gradient of a probability) is a sum of terms with the
    # spacing of bfloat16, and has no better one
    rounds_inside: bool = False
    double_backward: bool = True  # whether the op is twice differentiable (as torch's own is)
    limits: tuple[str, ...] = ()  # known limits, one sentence each, for the documentation page

    def inner_dtype(self, sample: Sample) -> torch.dtype | None:
        """Return the dtype that inner values are rounded to, where the kernels round any.

        That is the one of the least precision among the floating tensors of the call.
        """
        return sample.least_dtype if self.rounds_inside else None


def describe(
    op: Callable[..., Tensors],
    eager: Callable[..., Tensors],
    samples: Callable[[TensorFactory], list[Sample]],
    bad_inputs: Callable[[torch.device], list[BadInput]],
    bench_case: Callable[..., BenchCase],
) -> functools.partial[Spec]:
    """Return what makes the ``Spec`` of an op of the other fields; ``samples`` takes a factory."""

    def drawn(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        return samples(TensorFactory(device, dtype))

    functions = (op, eager, drawn, bad_inputs)
    return functools.partial(Spec, op.__name__, *functions, bench_case=bench_case)


@dataclass(frozen=True)
class MultiTensorSpec:
    """What tests and fuzzers need to know of an operator over lists of tensors.

    It is no ``Spec``: such an operator has no public function of its own that returns what it
    computes, no gradient and no row in the table of ops, and may write to its arguments.
    """

    name: str  # the operator's name, and that of its file
    # ``calls(device, dtype)`` gives right calls of the operator; their ``args`` are those of its
    # schema, in order, and no two tensors share memory
    calls: Callable[[torch.device, torch.dtype], list[Sample]]
