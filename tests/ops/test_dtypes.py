"""Autocast, and calls whose tensors have several dtypes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fusedops
from fusedops.specs import Sample, Spec, all_specs, tensors_in
from fusedops.specs.comparison import difference_of_mixture, fresh, run
from fusedops.specs.recorder import RecordOps

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
    for sample in map(fresh, spec.samples(torch.device("cpu"), dtype)):
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
                outputs = tensors_in(spec.op(*of_function.args, **of_function.kwargs))
                direct = tensors_in(func(*of_operator))
        found = [output.dtype for output in outputs]
        if spec.autocast == "norm" and sample.kwargs.get("rounding") != "hf":
            assert found == [torch.float32], sample.name
        assert found == [output.dtype for output in direct[: len(outputs)]], sample.name


@pytest.mark.parametrize("name", all_specs())
def test_the_reference_has_the_dtypes_of_the_kernels(name: str) -> None:
    """Of all outputs, statistics that are saved for the backward included."""
    spec = all_specs()[name]
    samples = list(map(fresh, spec.samples(torch.device("cpu"), torch.float32)))[:3]
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


def _kind(sample: Sample) -> tuple[object, ...]:
    """What tells samples of one op apart here: which arguments are tensors, and their options."""
    values = (*sample.args, *sample.kwargs.values())
    places = tuple(value if isinstance(value, str) else type(value).__name__ for value in values)
    return places, tuple(sample.kwargs), tuple(tensor.dtype for tensor in sample.tensors)


@functools.cache
def _samples(spec: Spec) -> list[Sample]:
    """One sample of each kind, small ones with elements before others."""
    found: dict[tuple[object, ...], Sample] = {}
    for sample in spec.samples(torch.device("cpu"), torch.float32):
        size = sum(tensor.numel() for tensor in sample.tensors)
        if size < 3000 and all(tensor.numel() for tensor in sample.tensors):
            found.setdefault(_kind(sample), sample)
    return list(found.values())


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
    samples = spec.samples(torch.device("cpu"), torch.float32)
    (sample,) = [each for each in samples if each.name == sample_name]
    wide, every = (torch.float32,) * (len(sample.tensors) - narrow), (True,) * len(sample.leaves)
    for half in (torch.bfloat16, torch.float16):
        with fusedops.use_backend(backend):
            found = difference_of_mixture(spec, _with(sample, (half,) * narrow + wide, every))
        assert found is None, f"{half}: {found}"
