"""Where the result of a call with NaN and infinities is not what eager torch gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops._core import backends, dtypes
from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import ComparisonResult, fresh, output_dtypes, run


def differences_where_not_finite(
    results: dict[str, ComparisonResult],
    spec: Spec,
    sample: Sample,
    incoming: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]],
) -> dict[str, str | None]:
    """Return for each result what in it is not what eager torch gives, and where, or ``None``.

    Each element of an output is what one of ``spec.non_finite`` gives, in the dtype of the call or
    in float64: NaN, the same infinity, or a number within the error budget. Of a gradient NaN may
    stand for an infinity and the reverse: it comes of differences of infinities, and which are
    taken first differs between torch's own kernels.

    Args:
        results: what the call gave, by name of the backend.
        spec: of the op.
        sample: the call, with tensors that are not finite.
        incoming: gave the incoming gradients.
    """
    functions = spec.non_finite or (spec.eager,)
    if sample.random:
        functions = (functools.partial(_on_reference, spec.op),)
    given = output_dtypes(spec, sample)
    pairs = [
        (
            run(function, fresh(sample, torch.float64), incoming, given),
            run(function, fresh(sample), incoming),
        )
        for function in functions
    ]
    return {name: _unlike_eager(result, pairs, spec, sample) for name, result in results.items()}


def _unlike_eager(
    actual: ComparisonResult,
    pairs: list[tuple[ComparisonResult, ComparisonResult]],
    spec: Spec,
    sample: Sample,
) -> str | None:
    depth, inside = spec.depth(sample), spec.inner_dtype(sample)
    for index, got in enumerate(actual.outputs):
        references = [(exact.outputs[index], eager.outputs[index]) for exact, eager in pairs]
        message = _unlike_all(got, references, depth.outputs, inside, of_gradient=False)
        if message is not None:
            return f"output {index}: {message}"
    for index, got in enumerate(actual.grads):
        references = [(exact.grads[index], eager.grads[index]) for exact, eager in pairs]
        message = _unlike_all(got, references, depth.gradients[index], inside, of_gradient=True)
        if message is not None:
            return f"gradient {index}: {message}"
    return None


def _on_reference(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with backends.use_backend("torch"):
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
