"""Incoming gradients of every dtype and layout, of one output at a time, to one argument at a time.

What a backward returns must be what its fake says, since Inductor reads memory by the fake's
strides; and all digits of an incoming gradient count, whatever the dtype of the inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_within_budget
from covering import covering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core.generators import seed_generators
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import floating, fresh, incoming, run
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)


def each_sample(backend: str, most: int, size: int, *marks: Any) -> Iterator[Any]:
    """Yield samples in float32 that meet every option; those of most elements are left out."""
    for spec in all_specs().values():
        found = [each for each in spec.samples(CPU, torch.float32) if each.leaves]
        small = [each for each in found if max(t.numel() for t in each.tensors) <= size]
        chosen = covering(small or found[:1])[:most] if found else []
        for sample in (each for each in found if each.name in chosen):
            name = f"{backend}-{spec.name}-{sample.name}"
            yield pytest.param(backend, spec, sample, id=name, marks=marks)


each_run = pytest.mark.parametrize(
    ("backend", "spec", "sample"),
    [
        *each_sample("cpp", 99, 10_000),
        *each_sample("torch", 99, 10_000),
        *each_sample("triton", 2, 500, pytest.mark.interpreter),
    ],
)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the dims in memory in the reverse order."""
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


def with_gradients_of(sample: Sample, indices: set[int]) -> Sample:
    """Return the call with only these of its leaves requiring a gradient."""
    chosen = {id(leaf) for index, leaf in enumerate(sample.leaves) if index in indices}
    return sample.map(lambda t: t.detach().clone().requires_grad_(id(t) in chosen))


def subsets_of_leaves(sample: Sample) -> list[set[int]]:
    """Return all leaves, each alone, and all but each; no subset twice."""
    everything = set(range(len(sample.leaves)))
    subsets = [everything]
    for only in ({index} for index in everything):
        subsets += [subset for subset in (only, everything - only) if subset not in subsets]
    return [subset for subset in subsets if subset]


def described(result: Any) -> list[Any]:
    """Return shape, dtype and strides of each tensor; a dim of one element has no stride."""
    results = result if isinstance(result, (tuple, list)) else [result]
    found: list[Any] = []
    for value in results:
        if value is None:
            found.append(None)
            continue
        pairs = zip(value.stride(), value.shape, strict=True)
        strides = [stride for stride, size in pairs if size > 1 and value.numel()]
        found.append((tuple(value.shape), value.dtype, strides))
    return found


FAKES = FakeTensorMode()


@torch.no_grad()
def assert_laid_out_as_the_fake(func: Any, args: tuple[Any, ...], where: str) -> None:
    result = func(*args)
    with FAKES:
        fake = func(*pytree.tree_map_only(torch.Tensor, FAKES.from_tensor, args))
    assert described(result) == described(fake), where


@each_run
def test_gradients_are_laid_out_as_the_fakes_say(backend: str, spec: Spec, sample: Sample) -> None:
    with fusedops.use_backend(backend):
        for subset in subsets_of_leaves(sample):
            call = with_gradients_of(sample, subset)
            outputs = floating(spec.op(*call.args, **call.kwargs))
            for index, (output, grad) in enumerate(zip(outputs, incoming(outputs), strict=True)):
                if not output.requires_grad:
                    continue
                with RecordOps() as recorded:
                    torch.autograd.grad(
                        output, call.leaves, transposed(grad), retain_graph=True, allow_unused=True
                    )
                for func, args in recorded.calls:
                    where = f"{func}, gradients of {subset}, incoming that of output {index}"
                    assert_laid_out_as_the_fake(func, args, where)


def wide_outputs(spec: Spec, sample: Sample) -> Iterator[Sample]:
    """Yield the call with some of its tensors in half precision, where an output is float32."""
    floats = [tensor for tensor in sample.tensors if tensor.is_floating_point()]
    for half, kept in itertools.product(HALF, (None, *floats)):
        narrow = {id(tensor) for tensor in floats if tensor is not kept}
        call = sample.map(
            lambda tensor, half=half, narrow=narrow: (
                tensor.detach().to(half).requires_grad_(tensor.requires_grad)
                if id(tensor) in narrow
                else tensor
            )
        )
        try:
            outputs = floating(spec.op(*call.args, **call.kwargs))
        except TypeError:  # the op does not take such a mixture
            continue
        if any(out.dtype == torch.float32 and out.requires_grad for out in outputs):
            yield call


@each_run
def test_all_digits_of_incoming_gradients_count(backend: str, spec: Spec, sample: Sample) -> None:
    """Gradients that differ past half precision alone give different results, as the reference's.

    Rounding an incoming float32 gradient to the dtype of the inputs would make them the same.
    """

    def differing(call: Sample, backend: str) -> list[bool]:
        half = call.least_dtype
        with fusedops.use_backend(backend):
            exact = run(spec.op, fresh(call))
            outputs = floating(exact.outputs)
            rounded = run(spec.op, fresh(call), rounded_to=[half] * len(outputs))
        return [not torch.equal(*pair) for pair in zip(exact.grads, rounded.grads, strict=True)]

    for call in wide_outputs(spec, sample):
        seed_generators(11)
        mine, reference = differing(call, backend), differing(call, "torch")
        for leaf, found, wanted in zip(call.leaves, mine, reference, strict=True):
            # In half precision the result's own rounding may hide the difference.
            assert found or not wanted or leaf.dtype != torch.float32, f"{leaf.dtype} {leaf.shape}"
        assert any(mine) or not any(reference)


@each_run
def test_gradients_of_one_output_alone(backend: str, spec: Spec, sample: Sample) -> None:
    """The other outputs are unused: their incoming gradients are absent, and count as zero."""
    with fusedops.use_backend(backend):
        whole = floating(spec.op(*sample.args, **sample.kwargs))

    def one_of(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: floating(function(*args, **kwargs))[place]

    differentiable = [place for place, output in enumerate(whole) if output.requires_grad]
    for place in differentiable if len(whole) > 1 else ():
        one = dataclasses.replace(spec, op=one_of(spec.op, place), eager=one_of(spec.eager, place))
        # The truth of a call that draws is that of the reference.
        call = with_gradients_of(sample, _reached(one, sample))
        with fusedops.use_backend(backend):
            actual = run(one.op, fresh(call))
        assert_within_budget(actual, one, call)


def _reached(spec: Spec, sample: Sample) -> set[int]:
    """Return the places of the leaves that the output depends on."""
    call = fresh(sample)
    output = spec.eager(*call.args, **call.kwargs)
    grads = torch.autograd.grad(output.sum(), call.leaves, allow_unused=True)
    return {place for place, grad in enumerate(grads) if grad is not None}
