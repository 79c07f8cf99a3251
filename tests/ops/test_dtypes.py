"""Autocast, calls of several dtypes, and incoming gradients of every dtype and layout.

What a backward returns must be what its fake says, since Inductor reads memory by the fake's
strides; and all digits of an incoming gradient count, whatever the dtype of the inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same_bits, assert_within_budget
from covering import covering
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core.generators import seed_generators
from fusedops.specs import Sample, Spec, all_specs, tensors_in
from fusedops.specs.comparison import difference_of_mixture, floating, fresh, incoming, run
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")

# Their functions cast some arguments only, which no word of define_op says.
CAST_SOME = {
    *("attention", "attention_decode", "attention_varlen", "moe_mlp"),
    *("add_layer_norm", "add_rms_norm"),
}
SPECS = [
    spec for name, spec in all_specs().items() if spec.autocast != "keep" and name not in CAST_SOME
]


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    """Enable autocast for a device that need not be there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_operator_and_function_give_the_same_dtypes(spec: Any, dtype: torch.dtype) -> None:
    device = "cuda" if spec.autocast == "norm" else "cpu"
    for sample in map(fresh, spec.samples(CPU, dtype)):
        with RecordOps() as recorder:
            spec.op(*sample.args, **sample.kwargs)
        ((func, args),) = recorder.calls
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                with mode:
                    layout = tensor.shape, tensor.stride()
                    return torch.empty_strided(*layout, dtype=tensor.dtype, device=device)

            of_function = sample.map(fake)
            of_operator = pytree.tree_map_only(torch.Tensor, fake, args)
            with _autocast(device):
                outputs = floating(spec.op(*of_function.args, **of_function.kwargs))
                direct = tensors_in(func(*of_operator))
        found = [output.dtype for output in outputs]
        if spec.autocast == "norm" and sample.kwargs.get("rounding") != "hf":
            assert found == [torch.float32], sample.name
        assert found == [output.dtype for output in direct[: len(outputs)]], sample.name


@pytest.mark.parametrize("name", all_specs())
def test_the_reference_has_the_dtypes_of_the_kernels(name: str) -> None:
    """Of all outputs, statistics that are saved for the backward included."""
    spec = all_specs()[name]
    samples = list(map(fresh, spec.samples(CPU, torch.float32)))[:3]
    for sample in samples:
        with RecordOps() as recorder:
            spec.op(*sample.args, **sample.kwargs)
        for func, args in recorder.calls:
            found = []
            for backend in ("cpp", "torch"):
                with fusedops.use_backend(backend), _autocast("cpu"), torch.no_grad():
                    found.append([output.dtype for output in tensors_in(func(*args))])
            assert found[0] == found[1], (func, sample.name)


# The dtypes of one call. All four at once would be three times as many calls, and the kernels know
# no more than two.
FAMILIES = (
    (torch.float32, torch.bfloat16, torch.float64),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
)
# More tensors than this are not given all combinations, but each pair of dtypes for each of them.
MOST_TENSORS = 4


def _samples(spec: Spec) -> list[Sample]:
    """Return small samples with elements that together meet every option."""
    small = [
        sample
        for sample in spec.samples(CPU, torch.float32)
        if all(tensor.numel() for tensor in sample.tensors)
        and sum(tensor.numel() for tensor in sample.tensors) < 3000
    ]
    names = covering(small) if small else []
    return [sample for sample in small if sample.name in names]


def _mixtures(count: int) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield dtypes for ``count`` tensors, of at least two kinds."""
    for dtypes in FAMILIES:
        if count <= MOST_TENSORS:
            combined = itertools.product(dtypes, repeat=count)
            yield from (each for each in combined if len(set(each)) > 1)
            continue
        for most, other in itertools.permutations(dtypes, 2):
            for place in range(count):
                yield tuple(other if at == place else most for at in range(count))
            for first in range(2, count - 1):
                yield tuple(other if at >= first else most for at in range(count))


def _subsets(count: int, *, pairs: bool) -> Iterator[tuple[bool, ...]]:
    """Yield which of ``count`` tensors require a gradient: none, or one; if ``pairs``, others."""
    for subset in itertools.product((False, True), repeat=count):
        if sum(subset) < 2 or (pairs and sum(subset) < count <= MOST_TENSORS):
            yield subset


def _with(sample: Sample, dtypes: tuple[torch.dtype, ...], wanted: tuple[bool, ...]) -> Sample:
    """Return the call with these dtypes of its floating tensors and gradients of its leaves."""
    of_floating, of_leaves = iter(dtypes), iter(wanted)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        new = tensor.detach().to(next(of_floating))
        return new.requires_grad_(tensor.requires_grad and next(of_leaves))

    return sample.map(change)


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("spec", "sample"),
    [
        pytest.param(spec, sample, id=f"{spec.name}-{sample.name}")
        for spec in all_specs().values()
        for sample in _samples(spec)
    ],
)
def test_mixed_dtypes_match_float64_for_each_subset_of_gradients(
    spec: Spec, sample: Sample, pairs: bool
) -> None:
    count = sum(tensor.is_floating_point() for tensor in sample.tensors)
    every = (True,) * len(sample.leaves)
    for dtypes in _mixtures(count):
        mixture = _with(sample, dtypes, every)
        try:
            whole = run(spec.op, mixture)
        except TypeError as error:
            assert spec.name in str(error), f"the message does not name {spec.name}: {error}"
            continue
        found = difference_of_mixture(spec, mixture)
        assert found is None, f"dtypes {dtypes}: {found}"
        for subset in _subsets(len(every), pairs=pairs):
            part = run(spec.op, _with(sample, dtypes, subset))
            wanted = list(itertools.compress(whole.grads, subset))
            where = f"dtypes {dtypes}, gradients {subset}"
            assert_same_bits([part.outputs, part.grads], [whole.outputs, wanted], where)


# Op, sample, and how many of its tensors are in half precision: its parameters are in float32.
WIDE_PARAMETERS = [
    ("bias_gelu", "default", 1),
    ("rotary_embedding", "partial", 2),
    ("scaled_masked_softmax", "additive_per_row", 1),
]


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
@pytest.mark.parametrize(("name", "sample_name", "narrow"), WIDE_PARAMETERS)
def test_wide_parameters_on_other_backends(
    name: str, sample_name: str, narrow: int, backend: str
) -> None:
    spec = all_specs()[name]
    samples = spec.samples(CPU, torch.float32)
    (sample,) = [each for each in samples if each.name == sample_name]
    wide, every = (torch.float32,) * (len(sample.tensors) - narrow), (True,) * len(sample.leaves)
    for half in (torch.bfloat16, torch.float16):
        with fusedops.use_backend(backend):
            found = difference_of_mixture(spec, _with(sample, (half,) * narrow + wide, every))
        assert found is None, f"{half}: {found}"


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
