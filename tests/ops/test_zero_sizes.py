"""Every size that a contract names may be 0: each backend then does what the reference does."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import backends, contract, extension
from fusedops._core.generators import seed_generators
from fusedops.specs import all_specs, tensors_in
from fusedops.specs.comparison import fresh, incoming
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
NAMES = list(all_specs())
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
NATIVE = ["cpp"] if extension.cpu_library() is None else []
CHECKING = [*NATIVE, "torch"][0]
INTEGERS = (torch.int32, torch.int64)
Call = list[Any]
Outcome = list[torch.Tensor] | str


def _calls(name: str, count: int | None) -> Iterator[tuple[str, Call]]:
    """Yield operator and arguments of the forward calls that an op's first samples make.

    Samples with large values are left out: their rounding is compared elsewhere.
    """
    spec = all_specs()[name]
    samples = [
        sample
        for sample in spec.samples(CPU, torch.float32)
        if "extreme" not in sample.name and not sample.name.startswith("offset")
    ]
    with RecordOps() as recorder:
        for sample in map(fresh, samples[:count]):
            spec.op(*sample.args, **sample.kwargs)
    for func, args in recorder.calls:
        yield func._opname, list(args)


def _zeroed(program: contract.Program, args: Call, most: int) -> Iterator[Call]:
    """Yield calls like this one, in which up to ``most`` sizes, or one of a list, are 0."""
    known = program.check(args)
    defined = {step.name for step in program.steps if isinstance(step, contract.Definition)}
    names = sorted(known.sizes.keys() - defined)
    for some in itertools.combinations_with_replacement(names, most):
        with contextlib.suppress(ValueError):  # another size would be negative
            yield _resized(program, known, dict.fromkeys(some, 0), {})
    others = {name for kind, name in program.arguments if kind in ("int[]", "bool[]")}
    lists = {name: sizes for name, sizes in known.lists.items() if name not in others | defined}
    for sizes in sorted(set(lists.values())):
        for place in range(len(sizes)):
            new = (*sizes[:place], 0, *sizes[place + 1 :])
            changes = {name: new for name, old in lists.items() if old == sizes}
            with contextlib.suppress(ValueError):  # lists that then do not broadcast
                yield _resized(program, known, {}, changes)


def _resized(
    program: contract.Program,
    known: contract.Bindings,
    sizes: dict[str, int],
    lists: dict[str, tuple[int, ...]],
) -> Call:
    """Return the arguments that fit to changed sizes."""
    new = dataclasses.replace(known, sizes=known.sizes | sizes, lists=known.lists | lists)
    for step in program.steps:
        if isinstance(step, contract.Definition):
            program._define(step, new)
    args = [
        list(new.lists[name]) if kind == "SymInt[]" else arg
        for (kind, name), arg in zip(program.arguments, known.args, strict=True)
    ]
    for rule in program.steps:
        if isinstance(rule, contract.TensorRule) and args[rule.argument] is not None:
            tensor = args[rule.argument]
            matching = (
                sizes
                for sizes in rule.shapes
                if contract._match(sizes, tensor.shape, dataclasses.replace(known))
            )
            shape = _shape(next(matching), tensor.shape, new)
            if any(size < 0 for size in shape):
                raise ValueError(shape)
            cut = tensor.detach()[tuple(slice(size) for size in shape)]
            fits = cut.shape == torch.Size(shape)
            args[rule.argument] = cut.clone() if fits else tensor.new_zeros(shape)
    return args


def _shape(
    rules: tuple[contract.SizeRule, ...], old: torch.Size, new: contract.Bindings
) -> list[int]:
    """Return what a shape becomes when the sizes that it is made of do."""
    shape: list[int] = []
    for rule in rules:
        if rule.is_list:
            wanted = list(new.lists[rule.expression])
            wanted = wanted[len(rules) - 1 + len(wanted) - len(old) :] if rule.shorter else wanted
        elif rule.expression == ("unknown",):
            wanted = [old[len(shape)]]
        else:
            wanted = [contract._value(rule.expression, new)]
        for size in wanted:
            shape.append(1 if rule.broadcast and old[len(shape)] == 1 else size)
    return shape


def _outcome(op: str, backend: str, args: Call) -> Outcome:
    """Return outputs and gradients of a call, without what it saves, or the error."""
    forward, backward = backends._KERNELS[op].contracts
    differentiable = [rule.name for rule in backward.results] if backward else []
    places = [
        place
        for place, (_, name) in enumerate(forward.arguments)
        if name in differentiable and args[place] is not None and args[place].is_floating_point()
    ]
    args = list(args)
    for place in places:
        args[place] = args[place].detach().requires_grad_()
    seed_generators(5)
    try:
        with fusedops.use_backend(backend):
            outputs = tensors_in(getattr(torch.ops.fusedops, op)(*args))
            wide = tuple(output for output in outputs if output.requires_grad)
            leaves = [args[place] for place in places]
            grads = torch.autograd.grad(wide, leaves, incoming(wide)) if wide else ()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not wide:
        return list(outputs)
    return [*wide, *(output for output in outputs if not output.is_floating_point()), *grads]


def _with_right_indices(op: str, args: Call) -> Call | None:
    """Return the call with indices that a backend which looks at them takes, if there are any."""
    for fill in (None, 0, -1):
        filled = [
            torch.full_like(arg, fill)
            if fill is not None and isinstance(arg, torch.Tensor) and arg.dtype in INTEGERS
            else arg
            for arg in args
        ]
        if not isinstance(_outcome(op, CHECKING, filled), str):
            return filled
    return None


@pytest.mark.parametrize("backend", [*NATIVE, TRITON])
@pytest.mark.parametrize("name", NAMES)
def test_a_size_of_zero_is_what_the_reference_makes_of_it(name: str, backend: str) -> None:
    # The interpreter takes a second for some calls.
    most, count = (1, 6) if backend == "triton" else (2, None)
    tried = set()
    for op, args in _calls(name, count):
        program = backends._KERNELS[op].contracts[0]
        for zeroed in _zeroed(program, args, most):
            call = f"{op}{[getattr(arg, 'shape', arg) for arg in zeroed]}"
            if call in tried:
                continue
            tried.add(call)
            right = _with_right_indices(op, zeroed)
            if right is None:
                refused = _outcome(op, CHECKING, zeroed)
                assert re.match(f"(Type|Value)Error: {op}: ", str(refused)), f"{call}: {refused}"
                continue
            want, got = (_outcome(op, each, right) for each in ("torch", backend))
            assert not isinstance(want, str) and not isinstance(got, str), f"{call}: {want} {got}"
            assert len(got) == len(want), call
            for actual, expected in zip(got, want, strict=True):
                assert actual.dtype == expected.dtype and actual.shape == expected.shape, call
                torch.testing.assert_close(actual, expected, equal_nan=True)
    assert tried


@pytest.mark.parametrize("backend", [*NATIVE, "torch", TRITON])
def test_attention_of_no_heads_is_what_torch_makes_of_it(backend: str) -> None:
    leaves = [torch.zeros(2, 0, 5, 8, requires_grad=True) for _ in range(3)]
    with fusedops.use_backend(backend):
        output = fusedops.attention(*leaves)
        grads = torch.autograd.grad(output.sum(), leaves)
    want = torch.nn.functional.scaled_dot_product_attention(*leaves)
    assert output.shape == want.shape == (2, 0, 5, 8)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
