"""Every size may be 0: each backend then does what the reference does, or the contract refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import extension
from fusedops._core.generators import seed_generators
from fusedops.specs import all_specs, tensors_in
from fusedops.specs.comparison import fresh, incoming
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
NATIVE = ["cpp"] if extension.cpu_library() is None else []
CHECKING = [*NATIVE, "torch"][0]
INTEGERS = (torch.int32, torch.int64)
Call = list[Any]
Place = tuple[int, int]  # an argument, and a dim counted from its last
Outcome = list[torch.Tensor] | str


def _calls(name: str, count: int | None) -> dict[Any, list[Call]]:
    """Return operator -> arguments of the forward calls that an op's first samples make.

    Samples with large values are left out: their rounding is compared elsewhere.
    """
    spec = all_specs()[name]
    samples = [
        sample
        for sample in spec.samples(CPU, torch.float32)
        if "extreme" not in sample.name and "offset" not in sample.name
    ]
    with RecordOps() as recorder:
        for sample in map(fresh, samples[:count]):
            spec.op(*sample.args, **sample.kwargs)
    calls: dict[Any, list[Call]] = {}
    for func, args in recorder.calls:
        calls.setdefault(func, []).append(list(args))
    return calls


def _sizes(call: Call) -> dict[Place, int]:
    """Return the size of each dim of a tensor, and each number of a list."""
    shapes = {
        number: value.shape if isinstance(value, torch.Tensor) else value
        for number, value in enumerate(call)
        if isinstance(value, (torch.Tensor, list))
    }
    return {
        (number, dim - len(shape)): size
        for number, shape in shapes.items()
        for dim, size in enumerate(shape)
        if type(size) is int
    }


def _tied(calls: list[Call]) -> dict[tuple[Place, Place], bool]:
    """Return which sizes are the same one: equal in all calls, or 1 where they broadcast."""
    tied: dict[tuple[Place, Place], bool] = {}
    for sizes in map(_sizes, calls):
        for pair in itertools.product(sizes, repeat=2):
            one, other = (sizes[place] for place in pair)
            tied[pair] = tied.get(pair, True) and (one == other or 1 in (one, other))
    return tied


def _zeroed(call: Call, tied: dict[tuple[Place, Place], bool], most: int) -> Iterator[Call]:
    """Yield calls like this one, in which up to ``most`` sizes are 0 wherever they stand."""
    sizes = _sizes(call)
    same = set()
    for one in sizes:
        places = [place for place in sizes if tied[one, place]]
        if sizes[one] > 1 or all(sizes[place] == 1 for place in places):  # it does not broadcast
            same.add(frozenset(place for place in places if sizes[place] == sizes[one]))
    for some in itertools.combinations_with_replacement(same, most):
        places = frozenset().union(*some)
        yield [_without(number, value, places) for number, value in enumerate(call)]


def _without(number: int, value: Any, places: frozenset[Place]) -> Any:
    """Return an argument with sizes of 0 in these places."""
    if isinstance(value, list):
        return [0 if (number, i - len(value)) in places else n for i, n in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        return value
    dims = range(-value.dim(), 0)
    kept = tuple(slice(0 if (number, dim) in places else None) for dim in dims)
    return value.detach()[kept].clone().requires_grad_(value.requires_grad)


def _outcome(func: Any, backend: str, args: Call) -> Outcome:
    """Return outputs and gradients of a call, without what it saves, or the error."""
    seed_generators(5)
    try:
        with fusedops.use_backend(backend):
            outputs = tensors_in(func(*args))
            wide = tuple(output for output in outputs if output.requires_grad)
            leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
            grads = (
                torch.autograd.grad(wide, leaves, incoming(wide), allow_unused=True) if wide else ()
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not wide:
        return list(outputs)
    whole = [output for output in outputs if not output.is_floating_point()]
    return [*wide, *whole, *(grad for grad in grads if grad is not None)]


def _with_right_indices(func: Any, args: Call) -> Call | None:
    """Return the call with indices that a backend which looks at them takes, if there are any."""
    for fill in (None, 0, -1):
        filled = [
            torch.full_like(arg, fill)
            if fill is not None and isinstance(arg, torch.Tensor) and arg.dtype in INTEGERS
            else arg
            for arg in args
        ]
        if not isinstance(_outcome(func, CHECKING, filled), str):
            return filled
    return None


@pytest.mark.parametrize("backend", [*NATIVE, TRITON])
@pytest.mark.parametrize("name", all_specs())
def test_a_size_of_zero_is_what_the_reference_makes_of_it(name: str, backend: str) -> None:
    # The interpreter takes a second for some calls.
    most, count = (1, 6) if backend == "triton" else (2, None)
    tried, taken = set(), 0
    for func, calls in _calls(name, count).items():
        op, tied = func._opname, _tied(calls)
        for zeroed in (zeroed for call in calls for zeroed in _zeroed(call, tied, most)):
            call = f"{op}{[getattr(arg, 'shape', arg) for arg in zeroed]}"
            if call in tried:
                continue
            tried.add(call)
            right = _with_right_indices(func, zeroed)
            if right is None:
                refused = _outcome(func, CHECKING, zeroed)
                assert re.match(f"(Type|Value)Error: {op}: ", str(refused)), f"{call}: {refused}"
                continue
            want, got = (_outcome(func, each, right) for each in ("torch", backend))
            assert not isinstance(want, str) and not isinstance(got, str), f"{call}: {want} {got}"
            assert len(got) == len(want), call
            for actual, expected in zip(got, want, strict=True):
                assert actual.dtype == expected.dtype and actual.shape == expected.shape, call
                torch.testing.assert_close(actual, expected, equal_nan=True)
            taken += 1
    assert taken, "every call with a size of 0 was refused"
