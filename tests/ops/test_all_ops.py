"""Every test that every op must pass, driven by the specs in ``fusedops/specs``."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import (
    assert_close,
    assert_same_bits,
    assert_same_bits_on_threads,
    assert_within_budget,
)
from covering import covering
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops._core import backends, extension
from fusedops._core.generators import seed_generators
from fusedops.specs import BadInput, Sample, Spec, all_specs, tensors_in
from fusedops.specs.comparison import (
    baseline,
    difference_from_exact,
    floating,
    fresh,
    incoming,
    run,
    truth,
)
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
SPECS = list(all_specs().values())
by_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)

CPP = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The reference is the same code for both half precisions; float16 has more digits to be held to.
REFERENCE = (torch.float32, torch.float16, torch.float64)
HALF = (torch.float32, torch.bfloat16, torch.float16)
RUNS = [
    (f"{backend}-{device}-{str(dtype)[6:]}", backend, device, dtype, marks)
    for backend, device, dtypes, marks in (
        ("cpp", "cpu", CPP, ()),
        ("torch", "cpu", REFERENCE, ()),
        ("triton", "cpu", HALF, (pytest.mark.interpreter,)),
        ("cuda", "cuda", HALF, (pytest.mark.gpu,)),
        ("triton", "cuda", HALF, (pytest.mark.gpu,)),
        ("torch", "cuda", (*HALF, torch.float64), (pytest.mark.gpu,)),
    )
    for dtype in dtypes
]


@functools.cache
def samples(name: str, dtype: torch.dtype, device: str = "cpu") -> list[Sample]:
    return all_specs()[name].samples(torch.device(device), dtype)


def first(spec: Spec, dtype: torch.dtype = torch.float32) -> Sample:
    return fresh(samples(spec.name, dtype)[0])


def sample_named(spec: Spec, sample_name: str, dtype: torch.dtype, device: str = "cpu") -> Sample:
    (found,) = [
        sample for sample in samples(spec.name, dtype, device) if sample.name == sample_name
    ]
    return fresh(found)


def each_sample() -> Any:
    pairs = [(spec, sample.name) for spec in SPECS for sample in samples(spec.name, torch.float32)]
    ids = [f"{spec.name}-{name}" for spec, name in pairs]
    return pytest.mark.parametrize(("spec", "sample_name"), pairs, ids=ids)


def in_first_tier(choose: Callable[[list[Sample]], list[str]]) -> Any:
    """The samples that ``choose`` names; the others in the second tier."""
    chosen = []
    for spec in SPECS:
        found = samples(spec.name, torch.float32)
        chosen_names = choose(found)
        for each in found:
            marks = [pytest.mark.slow] * (each.name not in chosen_names)
            chosen.append(pytest.param(spec, each.name, id=f"{spec.name}-{each.name}", marks=marks))
    return pytest.mark.parametrize(("spec", "sample_name"), chosen)


def each_run() -> Any:
    """Every sample on every backend in every dtype.

    A call takes Triton's interpreter seconds, and for kernels the half precisions differ in their
    conversions only: in the first tier every second sample has one of the two there, by turns. A
    sample of integers alone is the same in every dtype.
    """
    chosen = []
    for spec in SPECS:
        for number, sample in enumerate(samples(spec.name, torch.float32)):
            integers = not any(tensor.is_floating_point() for tensor in sample.tensors)
            half_of_sample = HALF[number % 4] if number % 4 in (1, 2) else None
            for run_id, backend, device, dtype, marks in RUNS:
                if integers and dtype != torch.float32:
                    continue
                interpreted = (backend, device) == ("triton", "cpu") and dtype in HALF[1:]
                second = interpreted and dtype != half_of_sample
                more = (*marks, pytest.mark.slow) if second else marks
                values = (spec, sample.name, backend, device, dtype)
                name = f"{run_id}-{spec.name}-{sample.name}"
                chosen.append(pytest.param(*values, id=name, marks=more))
    return pytest.mark.parametrize(("spec", "sample_name", "backend", "device", "dtype"), chosen)


@functools.lru_cache(maxsize=16)
def truth_and_baseline(name: str, sample_name: str, dtype: torch.dtype, device: str) -> Any:
    """Return what backends are compared with; the tests of a sample follow each other."""
    spec = all_specs()[name]
    sample = sample_named(spec, sample_name, dtype, device)
    return truth(spec, sample), baseline(spec, fresh(sample))


@each_run()
def test_values_and_gradients_match_float64(
    spec: Spec, sample_name: str, backend: str, device: str, dtype: torch.dtype
) -> None:
    if backend == "cuda" and not extension.has_operator("fusedops_cuda", spec.name):
        pytest.skip(f"{spec.name} has no CUDA C++ kernel")
    sample = sample_named(spec, sample_name, dtype, device)
    fusedops.reset_counters()
    with fusedops.use_backend(backend):
        actual = run(spec.op, sample)
    used = {used_backend for _, used_backend in fusedops.counters()}
    assert used == {backend}, f"ran on {used}"
    references = truth_and_baseline(spec.name, sample_name, dtype, device)
    found = difference_from_exact(actual, *references, spec, sample)
    assert found is None, found


@each_sample()
def test_gradients_pass_gradcheck(spec: Spec, sample_name: str) -> None:
    sample = sample_named(spec, sample_name, torch.float64)
    if not sample.leaves or any(leaf.numel() > 600 for leaf in sample.leaves):
        pytest.skip("nothing to differentiate, or too much for finite differences")
    fusedops.reset_counters()
    assert torch.autograd.gradcheck(*_as_function_of_leaves(spec, sample), fast_mode=True)
    assert {backend for _, backend in fusedops.counters()} == {"cpp"}, "not the real kernel"


@in_first_tier(covering)
def test_second_derivatives_pass_gradgradcheck(spec: Spec, sample_name: str) -> None:
    sample = sample_named(spec, sample_name, torch.float64)
    if not spec.double_backward:
        pytest.skip("the op is differentiable once")
    if not sample.leaves or any(leaf.numel() > 600 for leaf in sample.leaves):
        pytest.skip("nothing to differentiate, or too much for finite differences")
    assert torch.autograd.gradgradcheck(*_as_function_of_leaves(spec, sample), fast_mode=True)


def _as_function_of_leaves(spec: Spec, sample: Sample) -> tuple[Any, tuple[torch.Tensor, ...]]:
    leaves = sample.leaves

    def function(*values: torch.Tensor) -> Any:
        seed_generators(11)
        replaced = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
        call = sample.map(lambda tensor: replaced.get(id(tensor), tensor))
        return floating(spec.op(*call.args, **call.kwargs))

    return function, tuple(leaves)


@by_spec
def test_second_derivatives_in_float16_are_those_of_float64(spec: Spec) -> None:
    """The derivative of the backward is the reference's; it meets what the kernels have saved."""
    sample = first(spec, torch.float16)
    if not spec.double_backward or not sample.leaves:
        pytest.skip("the op is differentiable once")

    def twice(call: Sample) -> list[torch.Tensor]:
        seed_generators(11)
        outputs = floating(spec.op(*call.args, **call.kwargs))
        given = [each.half().to(each).requires_grad_() for each in incoming(outputs)]
        grads = torch.autograd.grad(outputs, call.leaves, given, create_graph=True)
        total = sum(grad.double().square().sum() for grad in grads)
        return list(torch.autograd.grad(total, [*call.leaves, *given], allow_unused=True))

    with fusedops.use_backend("torch"):
        eager = twice(fresh(sample))
    exact = twice(fresh(sample, torch.float64))
    for i, (mine, want, base) in enumerate(zip(twice(sample), exact, eager, strict=True)):
        assert (mine is None) == (want is None), f"derivative {i}"
        if mine is not None:
            assert_close(mine, want, base, f"derivative {i}", depth=sample.args[0].numel())


@in_first_tier(covering)
def test_operators_pass_opcheck(spec: Spec, sample_name: str) -> None:
    _assert_operators_pass_opcheck(spec, sample_named(spec, sample_name, torch.float32))


@by_spec
@pytest.mark.parametrize("dtype", CPP[1:], ids=lambda dtype: str(dtype)[6:])
def test_operators_of_other_dtypes_pass_opcheck(spec: Spec, dtype: torch.dtype) -> None:
    """Where a fake that always says float32 is wrong."""
    _assert_operators_pass_opcheck(spec, first(spec, dtype))


def _assert_operators_pass_opcheck(spec: Spec, sample: Sample) -> None:
    with RecordOps() as recorded:
        run(spec.op, sample)
    assert recorded.calls
    for func, args in recorded.calls:
        detached = tuple(
            arg.detach().clone().requires_grad_(arg.requires_grad)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        )
        tests = ["test_schema", "test_faketensor"]
        if not func._opname.endswith("_backward"):
            # What test_aot_dispatch_dynamic asks is asked by test_compiled_equals_eager below,
            # of the public function: dynamic, forward and gradients, bit for bit.
            tests.append("test_autograd_registration")
        torch.library.opcheck(func, detached, test_utils=tests)


@by_spec
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_values_shapes_are_those_of_the_results(spec: Spec, kind: str) -> None:
    """The public function on meta tensors (deferred initialisation), and under FakeTensorMode."""
    sample = first(spec)
    results = tensors_in(spec.op(*sample.args, **sample.kwargs))
    mode = FakeTensorMode()

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        empty = plain.to("meta") if kind == "meta" else mode.from_tensor(plain)
        return empty.requires_grad_(tensor.requires_grad)

    empty = sample.map(emptied)
    with mode if kind == "fake" else contextlib.nullcontext():
        outputs = tensors_in(spec.op(*empty.args, **empty.kwargs))
        for output, result in zip(outputs, results, strict=True):
            assert (output.shape, output.dtype) == (result.shape, result.dtype)
        if empty.leaves:
            wide = floating(outputs)
            grads = torch.autograd.grad(wide, empty.leaves, [torch.empty_like(o) for o in wide])
            assert [grad.shape for grad in grads] == [leaf.shape for leaf in empty.leaves]


@by_spec
def test_only_the_gradients_asked_for_are_computed(spec: Spec) -> None:
    sample = first(spec)
    whole = run(spec.op, sample)
    for index, leaf in enumerate(sample.leaves):
        seed_generators(11)
        outputs = floating(spec.op(*sample.args, **sample.kwargs))
        with RecordOps() as recorded:
            (grad,) = torch.autograd.grad(outputs, [leaf], incoming(outputs))
        assert torch.equal(grad, whole.grads[index])
        masks = [args[-1] for func, args in recorded.calls if func._opname.endswith("_backward")]
        assert masks and all(sum(mask) <= 1 for mask in masks), f"masks {masks}"


def _assert_compiled_equals_eager(spec: Spec, sample_name: str, **options: Any) -> None:
    sample = sample_named(spec, sample_name, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(spec.op, fullgraph=True, backend="aot_eager", **options)
    assert_same_bits(run(compiled, sample), run(spec.op, sample))


@functools.cache
def _with_new_floats(spec: Spec) -> set[str]:
    """Return the names of the samples that are the first to pass one of the op's numbers."""
    passed: set[Any] = set()
    names = set()
    for sample in samples(spec.name, torch.float32):
        given = [*enumerate(sample.args), *sample.kwargs.items()]
        floats = {name for name, value in given if isinstance(value, float)}
        if not floats <= passed:
            names.add(sample.name)
        passed |= floats
    return names


@pytest.mark.ci(every=7)
@in_first_tier(covering)
def test_compiled_equals_eager(spec: Spec, sample_name: str) -> None:
    # A number that becomes an input of the graph costs a second trace: once for each number.
    specialize = sample_name not in _with_new_floats(spec)
    with torch._dynamo.config.patch(specialize_float=specialize):
        _assert_compiled_equals_eager(spec, sample_name, dynamic=True)


@in_first_tier(lambda found: [found[0].name])  # fixed sizes ask for less
def test_compiled_with_fixed_sizes_equals_eager(spec: Spec, sample_name: str) -> None:
    _assert_compiled_equals_eager(spec, sample_name, dynamic=False)


@pytest.mark.ci(every=4)
@by_spec
def test_compiled_by_inductor_equals_eager(spec: Spec) -> None:
    sample = first(spec)
    torch._dynamo.reset()
    # Inductor draws its own random numbers unless told to draw torch's.
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(spec.op, fullgraph=True)
        assert_same_bits(run(compiled, sample), run(spec.op, sample))


@each_sample()
def test_autocast_gives_what_eager_gives(spec: Spec, sample_name: str) -> None:
    _assert_autocast_equals_eager(
        spec, sample_named(spec, sample_name, torch.float32), torch.bfloat16
    )


@by_spec
def test_autocast_to_float16_gives_what_eager_gives(spec: Spec) -> None:
    _assert_autocast_equals_eager(spec, first(spec), torch.float16)


def _assert_autocast_equals_eager(spec: Spec, sample: Sample, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        got = run(spec.op, sample)
        want = run(spec.eager, fresh(sample))
    # The exact result of the operands that both multiply: a loss that is one number may otherwise
    # owe its error, or eager its luck, to their rounding alone.
    rounded = sample.map(lambda t: _rounded(t, dtype) if spec.autocast == "lower" else t)
    exact = truth(spec, rounded)
    for i, (mine, eager) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        assert mine.dtype == eager.dtype, f"output {i}: {mine.dtype}, eager gives {eager.dtype}"
        if not mine.is_floating_point():
            assert torch.equal(mine, eager), f"output {i}"
        elif not sample.random:
            assert_close(mine, exact.outputs[i], eager, f"output {i}")


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype).to(tensor.dtype).requires_grad_(tensor.requires_grad)


@each_sample()
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "expanded_grad"])
def test_strides_do_not_change_the_result(spec: Spec, sample_name: str, layout: str) -> None:
    sample = sample_named(spec, sample_name, torch.float32)
    if layout == "expanded_grad":
        expanded, dense = (
            run(spec.op, call, lambda outputs, of=make: [of(output) for output in outputs])
            for call, make in ((sample, _expanded_ones), (fresh(sample), torch.ones_like))
        )
        return assert_same_bits(expanded, dense)
    shape = sample.args[0].shape
    relayout = {
        "transposed": _transposed,
        "sliced": _sliced,
        "expanded": lambda tensor: _expanded(tensor) if tensor.shape == shape else tensor,
    }[layout]
    strided = sample.map(
        lambda tensor: relayout(tensor.detach()).requires_grad_(tensor.requires_grad)
    )
    dense = strided.map(lambda t: t.detach().contiguous().requires_grad_(t.requires_grad))
    assert_same_bits(run(spec.op, strided), run(spec.op, dense))


def _expanded_ones(output: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=output.dtype).expand_as(output)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() >= 2 else _sliced(tensor)


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    never_read = float("nan") if tensor.is_floating_point() else -1
    wide = torch.full((*tensor.shape, 2), never_read, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() else tensor


by_spec_of_rows = pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec.rows_are_independent], ids=lambda spec: spec.name
)


def _rows(sample: Sample, count: int) -> Sample:
    """Return the call with the first rows of each tensor that has one for each row of the first."""
    shape = sample.args[0].shape

    def part(tensor: torch.Tensor) -> torch.Tensor:
        has_rows = tensor.dim() == len(shape) and tensor.shape[0] == shape[0]
        has_indices = not tensor.is_floating_point() and tensor.shape == shape[:-1]
        if not has_rows and not has_indices:
            return tensor
        return tensor.detach()[:count].clone().requires_grad_(tensor.requires_grad)

    return sample.map(part)


@by_spec_of_rows
def test_offsets_past_2_to_the_31_elements(spec: Spec) -> None:
    """Rows that lie 2**31 elements apart in (mostly untouched) memory give the same result."""
    far = 2**31 + 64

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(far + tensor[0].numel(), dtype=tensor.dtype)
        apart = memory.as_strided(tensor.shape, (far, *tensor[0].contiguous().stride()))
        return apart.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    two_rows = _rows(first(spec, torch.bfloat16), 2)
    shape = two_rows.args[0].shape
    assert len(shape) > 1
    spread_rows = two_rows.map(lambda t: spread(t) if t.shape == shape else t)
    assert_same_bits(run(spec.op, spread_rows), run(spec.op, two_rows))


@by_spec_of_rows
def test_a_row_does_not_depend_on_its_batch(spec: Spec) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sample = next(s for s in samples(spec.name, dtype) if s.args[0].shape[0] > 3)
        rows = sample.args[0].shape[0]
        whole = tensors_in(spec.op(*sample.args, **sample.kwargs))
        for count in (1, 3, rows - 1):
            part = _rows(sample, count)
            results = tensors_in(spec.op(*part.args, **part.kwargs))
            for got, want in zip(results, whole, strict=True):
                assert torch.equal(got, want[:count]), f"{count} of {rows} rows, {dtype}"


def each_bad_input() -> Any:
    pairs = [(spec, bad) for spec in SPECS for bad in spec.bad_inputs(CPU)]
    ids = [f"{spec.name}-{bad.name}" for spec, bad in pairs]
    return pytest.mark.parametrize(("spec", "bad"), pairs, ids=ids)


@each_bad_input()
@pytest.mark.parametrize("backend", [None, "torch"])
def test_bad_input_is_named(spec: Spec, bad: BadInput, backend: str | None) -> None:
    with fusedops.use_backend(backend), pytest.raises(bad.error) as caught:
        spec.op(*bad.args, **bad.kwargs)
    assert type(caught.value) is bad.error
    for words in (spec.name, *bad.mentions):
        assert words in str(caught.value), f"{words!r} is not in {caught.value}"


@by_spec
def test_same_bits_over_repeats_and_thread_counts(spec: Spec) -> None:
    for dtype, case in itertools.product((torch.float32, torch.bfloat16), spec.bench_cases[-1:]):
        assert_same_bits_on_threads(spec, case.make(CPU, dtype), (2, 1, 3, 2))


@by_spec
def test_explicit_backend_that_is_impossible_says_why(spec: Spec) -> None:
    sample = first(spec)
    with fusedops.use_backend("cuda"), pytest.raises(fusedops.UnsupportedError) as caught:
        spec.op(*sample.args, **sample.kwargs)
    assert "cuda" in str(caught.value) and "cpu" in str(caught.value)


@by_spec
def test_every_dtype_on_the_cpu_goes_to_the_compiled_kernel(spec: Spec) -> None:
    for dtype in CPP:
        fusedops.reset_counters()
        run(spec.op, first(spec, dtype))
        used = {backend for op, backend in fusedops.counters() if op.startswith(spec.name)}
        assert used == {"cpp"}, f"{dtype} ran on {used}"


@functools.cache
def opinfo(name: str) -> Any:
    """Return torch's own description of an op; to import all of them takes seconds."""
    module = "torch.testing._internal.common_methods_invocations"
    known = pytest.importorskip(module, reason="torch's samples need expecttest").op_db
    (found,) = [e for e in known if f"{e.name}.{e.variant_test_name}".rstrip(".") == name]
    return found


OPINFOS = [(spec, name) for spec in SPECS for name in spec.opinfo]


@pytest.mark.parametrize(
    ("spec", "name"), OPINFOS, ids=[f"{spec.name}-{name}" for spec, name in OPINFOS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_torchs_own_samples(spec: Spec, name: str, dtype: torch.dtype) -> None:
    count = 0
    for torch_sample in opinfo(name).sample_inputs("cpu", dtype, requires_grad=True):
        for variant in (torch_sample, torch_sample.noncontiguous()):
            call = spec.from_opinfo(variant.input, variant.args, variant.kwargs)
            if call is None:
                continue
            sample = Sample("opinfo", *call)
            got = run(spec.op, sample.map(lambda t: t.detach().requires_grad_(t.requires_grad)))
            assert_within_budget(got, spec, sample)
            count += 1
    assert count > 0


def test_a_wrong_element_is_named_with_its_place() -> None:
    want = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    for value in (4.5, float("nan"), float("inf")):
        got = want.float()
        got[1, 2] = value
        with pytest.raises(AssertionError, match=rf"1 of 6 .* worst, \[1, 2\], is {value}.* has 5"):
            assert_close(got, want, want.float(), "output 0")
    with pytest.raises(AssertionError, match=r"worst, \[\], is 2,"):
        assert_close(torch.tensor(2.0), torch.tensor(1.0).double(), torch.tensor(1.0), "scalar")
    past, infinite = torch.tensor([1e39], dtype=torch.float64), torch.tensor([float("inf")])
    assert_close(infinite, past, infinite, "past the largest number of float32")
    with pytest.raises(AssertionError, match=r"worst, \[0\], is -inf"):
        assert_close(-infinite, past, infinite, "of the wrong sign")


def test_every_registered_op_has_a_spec() -> None:
    missing = [
        f"fusedops/specs/{name}.py" for name in backends.op_names() if name not in all_specs()
    ]
    assert not missing, f"write {', '.join(missing)}"
    assert set(all_specs()) <= set(backends.op_names())
