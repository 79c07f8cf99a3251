"""What is not finite: NaN and infinities are where eager torch has them, and nowhere else.

Every floating argument of every sample, and every incoming gradient, gets NaN, inf and -inf in
turn: in one element, in a row, and all of them mixed; inf in the last element too, the end of a
vector. The rule is in docs/dev/operators.md; where an op differs on purpose it stands in its
docstring and, for these tests, in its spec's ``non_finite``.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import dtypes
from fusedops.specs import Sample, Spec, all_specs
from fusedops.specs.comparison import (
    ComparisonResult,
    baseline,
    fresh,
    incoming,
    output_dtypes,
    run,
    truth,
)

CPU = torch.device("cpu")
SPECS = list(all_specs().values())
VALUES = (math.nan, math.inf, -math.inf)
# A larger tensor has no place that these do not have, but for samples of several blocks.
MOST_ELEMENTS = 10_000

Change = Callable[[torch.Tensor], torch.Tensor]
Incoming = Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]]


def _unlike_eager(
    actual: ComparisonResult,
    pairs: list[tuple[ComparisonResult, ComparisonResult]],
    spec: Spec,
    sample: Sample,
) -> str | None:
    depth, inside = spec.depth(sample), spec.inner_dtype(sample)
    terms = [*[depth.outputs] * len(actual.outputs), *depth.gradients]
    whole = [
        ([*exact.outputs, *exact.grads], [*eager.outputs, *eager.grads]) for exact, eager in pairs
    ]
    for index, got in enumerate((*actual.outputs, *actual.grads)):
        references = [(exact[index], eager[index]) for exact, eager in whole]
        place = index - len(actual.outputs)
        message = _unlike_all(got, references, terms[index], inside, of_gradient=place >= 0)
        if message is not None:
            return f"{f'gradient {place}' if place >= 0 else f'output {index}'}: {message}"
    return None


def _on_reference(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with fusedops.use_backend("torch"):
        return op(*args, **kwargs)


def _unlike_all(
    got: torch.Tensor,
    references: list[tuple[torch.Tensor, torch.Tensor]],
    depth: int,
    inside: torch.dtype | None,
    *,
    of_gradient: bool,
) -> str | None:
    """Return where a tensor is like none of the pairs of what float64 and eager torch have."""
    if not got.is_floating_point():
        same = any(torch.equal(got, exact) for exact, _ in references)
        return None if same else f"{got.tolist()}, wanted {references[0][0].tolist()}"
    good = torch.zeros_like(got, dtype=torch.bool)
    for exact, eager in references:
        dtype = inside or got.dtype
        budget = dtypes.error_budget(eager, exact, dtype, depth=depth)
        # A gradient that is zero for eager torch is a difference of equal sums, each rounded, and a
        # norm of equal elements multiplies it by 1 / sqrt(eps), 316 with torch's default.
        budget = budget + 320.0 * torch.finfo(dtypes.statistics_dtype(dtype)).eps
        # Where eager torch has no value, its error says nothing about what rounding inside costs.
        scale = exact.abs().nan_to_num(0.0, 0.0, 0.0).max() if exact.numel() else 0.0
        budget = budget + (~eager.isfinite()) * (16.0 * torch.finfo(dtype).eps * scale)
        for want in (exact, eager.double()):
            near = got.isfinite() & ((got.double() - want).abs() <= budget)
            good |= near & want.isfinite()
            good |= (got == want) | (got.isnan() & want.isnan())
            if of_gradient:
                good |= (got.isnan() & want.isinf()) | (got.isinf() & want.isnan())
    if good.all():
        return None
    place = tuple(int(index) for index in (~good).nonzero()[0])
    pairs = ", ".join(f"{exact[place]:.9g} and {eager[place]:.9g}" for exact, eager in references)
    return (
        f"{int((~good).sum())} of {got.numel()} elements differ; the first, {list(place)}, is "
        f"{got[place]:.9g}, eager torch has in float64 and in its dtype {pairs}"
    )


def _in_one(tensor: torch.Tensor, value: float, last: bool) -> torch.Tensor:
    flat = tensor.detach().flatten().clone()
    flat[-1 if last else flat.numel() // 3] = value
    return flat.view(tensor.shape)


def _in_a_row(tensor: torch.Tensor, value: float) -> torch.Tensor:
    rows = torch.atleast_1d(tensor.detach()).clone().flatten(0, -2 if tensor.dim() > 1 else -1)
    rows[len(rows) // 2] = value
    return rows.view(tensor.shape)


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{tuple(tensor.shape)}".encode()))
    drawn = torch.randint(0, 12, tensor.shape, generator=generator)
    made = tensor.detach().clone()
    for number, value in enumerate(VALUES):
        made[drawn == number] = value
    return made


CHANGES: dict[str, Change] = {"mixed": _mixed}
for _value in VALUES:
    CHANGES[f"{_value}"] = functools.partial(_in_one, value=_value, last=False)
    CHANGES[f"{_value} in a row"] = functools.partial(_in_a_row, value=_value)
CHANGES["inf at the end"] = functools.partial(_in_one, value=math.inf, last=True)


def _calls(sample: Sample, names: Iterable[str]) -> Iterator[tuple[str, Sample, Any]]:
    """Return name, call and what makes its incoming gradients of each case of a sample."""
    changes = [(name, CHANGES[name]) for name in names]
    floats = [each for each in sample.tensors if each.is_floating_point() and each.numel()]
    for number, target in enumerate(floats):
        for name, change in changes:

            def changed(tensor: torch.Tensor, *, of=target, by=change) -> torch.Tensor:
                return by(tensor).requires_grad_(tensor.requires_grad) if tensor is of else tensor

            yield f"{name}, tensor {number} {list(target.shape)}", sample.map(changed), incoming
    for name, change in changes if sample.leaves else ():

        def gradients(outputs: tuple[torch.Tensor, ...], *, by=change) -> list[torch.Tensor]:
            return [by(each) if each.numel() else each for each in incoming(outputs)]

        yield f"{name}, incoming gradients", sample, gradients


def _assert_as_eager(
    spec: Spec, sample_name: str, dtype: torch.dtype, used: Iterable[str], changes: Iterable[str]
) -> None:
    (sample,) = [each for each in spec.samples(CPU, dtype) if each.name == sample_name]
    for case, call, gradients in _calls(sample, changes):
        _assert_call_as_eager(spec, call, used, case, gradients)


def _assert_call_as_eager(
    spec: Spec, call: Sample, used: Iterable[str], case: str = "", gradients: Incoming = incoming
) -> None:
    """Compare a call on each backend with eager torch.

    Each element of an output is what one of ``spec.non_finite`` gives, in the dtype of the call or
    in float64: NaN, the same infinity, or a number within the error budget. Of a gradient NaN may
    stand for an infinity and the reverse: it comes of differences of infinities, and which are
    taken first differs between torch's own kernels.
    """
    functions = spec.non_finite or (spec.eager,)
    if call.random:
        functions = (functools.partial(_on_reference, spec.op),)
    given = output_dtypes(spec, call)
    pairs = [
        (
            run(function, fresh(call, torch.float64), gradients, given),
            run(function, fresh(call), gradients),
        )
        for function in functions
    ]
    for backend in used:
        with fusedops.use_backend(backend):
            result = run(spec.op, fresh(call), gradients)
        found = _unlike_eager(result, pairs, spec, call)
        assert found is None, f"{backend}, {case}: {found}"


# Samples of an op in the first tier: one costs up to a second in each dtype. The first ones of
# linear_act are the activations.
FIRST = {"linear_act": 8}
# A backend may skip a block of keys that causality forbids, or multiply what is in it by zero. Both
# are right, as for calls without dropout, but a call that draws has one reference only.
MANY_REFERENCES = {("attention", "dropout_causal")}
# More of these in Triton. What dropout drops is 0 there, where the reference has 0 times a weight
# of NaN. A block's queries past the last one are zeros, whose product with an infinite key is NaN:
# the gradient of that key may be NaN where torch has 0.
MANY_REFERENCES_IN_TRITON = {
    ("attention", "dropout"),
    ("attention", "dropout_of_all"),
    ("attention", "one_query_with_a_bias"),
    ("attention", "one_query_float32_mask"),
    ("attention_varlen", "dropout"),
}


def each_sample(
    first: dict[str, int],
    otherwise: int,
    without: set[tuple[str, str]] = MANY_REFERENCES,
) -> Any:
    chosen = []
    for spec in SPECS:
        fitting = [
            sample.name
            for sample in spec.samples(CPU, torch.float32)
            if sum(tensor.numel() for tensor in sample.tensors) <= MOST_ELEMENTS
            and (spec.name, sample.name) not in without
            and any(tensor.is_floating_point() for tensor in sample.tensors)
        ]
        for number, name in enumerate(fitting):
            marks = [pytest.mark.slow] * (number >= first.get(spec.name, otherwise))
            chosen.append(pytest.param(spec, name, id=f"{spec.name}-{name}", marks=marks))
    return pytest.mark.parametrize(("spec", "sample_name"), chosen)


def _half(spec: Spec, sample_name: str) -> torch.dtype:
    """Return one of the half precisions: for the kernels they differ in their conversions only."""
    chosen = zlib.crc32(f"{spec.name} {sample_name}".encode()) % 2
    return (torch.bfloat16, torch.float16)[chosen]


@pytest.mark.ci(every=4)
@each_sample(FIRST, 2)
@pytest.mark.parametrize("dtype", [torch.float32, None, torch.float64], ids=["32", "half", "64"])
def test_what_is_not_finite_is_where_eager_torch_has_it(
    spec: Spec, sample_name: str, dtype: torch.dtype | None
) -> None:
    dtype = dtype or _half(spec, sample_name)
    _assert_as_eager(spec, sample_name, dtype, ("cpp", "torch"), CHANGES)


@pytest.mark.ci(every=4)
@pytest.mark.interpreter
@each_sample({}, 1, MANY_REFERENCES | MANY_REFERENCES_IN_TRITON)
@pytest.mark.parametrize(
    "changes",
    [("mixed", "inf in a row"), pytest.param(("nan", "-inf"), marks=pytest.mark.slow)],
    ids=["mixed", "alone"],
)
def test_in_triton_too(spec: Spec, sample_name: str, changes: tuple[str, ...]) -> None:
    # The interpreter takes seconds for one call.
    _assert_as_eager(spec, sample_name, torch.float32, ("triton",), changes)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_without_deviation_is_torchs_where_eps_is_zero(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[1], x[3] = 0.0, 2.0  # exact: nothing is left of the rows beside their means
    residual = [torch.zeros_like(x).requires_grad_()] if name.startswith("add") else []
    parameters = [torch.randn(33).to(dtype).requires_grad_() for _ in range(1 + ("layer" in name))]
    args = (x.requires_grad_(), *residual, (33,), *parameters)
    sample = Sample("constant rows", args, {"eps": 0.0})
    _assert_call_as_eager(all_specs()[name], sample, ("cpp", "torch"))


# Results of these are no larger than what they are made of: averages, probabilities, moved rows.
NEVER_OVERFLOW = {
    *("attention", "attention_decode", "attention_varlen", "gelu", "scaled_masked_softmax"),
    *("moe_pack", "moe_permute", "moe_relayout", "moe_unpack", "moe_unpermute"),
    *("moe_route", "moe_router_loss", "moe_sort", "token_logprobs"),
}


def _near_the_limit(spec: Spec, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield the call with a float16 tensor, or all, scaled to the end of the range."""
    found = [t for t in sample.tensors if t.dtype == torch.float16 and t.numel() and t.any()]

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().double()
        return (wide * (6e4 / wide.abs().max())).half().requires_grad_(tensor.requires_grad)

    for number, target in enumerate(found):
        case = f"tensor {number} {list(target.shape)}"
        yield case, sample.map(lambda each, of=target: scaled(each) if each is of else each)
    if spec.name not in NEVER_OVERFLOW:
        yield "all tensors", sample.map(lambda t: scaled(t) if any(t is f for f in found) else t)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_float16_overflows_where_eager_torch_does(spec: Spec) -> None:
    """A result past 65504 is inf. Inner values have the range of float32, eager's that of float16:
    what eager loses by them may be right here, but nothing that eager has is lost.
    """
    overflows = 0
    calls = [_near_the_limit(spec, each) for each in spec.samples(CPU, torch.float16)[:3]]
    for name, sample in itertools.chain(*calls):
        got, exact = run(spec.op, fresh(sample)), truth(spec, sample)
        eager = baseline(spec, fresh(sample))
        whole = ([*each.outputs, *each.grads] for each in (got, exact, eager))
        for index, (mine, want, torchs) in enumerate(zip(*whole, strict=True)):
            if mine.dtype != torch.float16:
                continue
            # Where a rounding in between decides, either is right.
            past, within = want.abs() > 65520 * 1.01, want.abs() < 65520 / 1.01
            lost = (
                past & ~mine.isinf() & torchs.isinf()
                | within & ~mine.isfinite() & torchs.isfinite()
            )
            place = tuple(lost.nonzero()[0].tolist()) if lost.any() else None
            assert place is None, (
                f"{name}, result {index}, {place}: {mine[place]}, float64 {want[place]}, eager "
                f"{torchs[place]}"
            )
            overflows += int((past & mine.isinf()).sum())
    assert (overflows > 0) == (spec.name not in NEVER_OVERFLOW)
