"""What a call of an op gives, what it should give, and where the two differ.

The truth is eager torch in float64, or for a call that draws numbers the reference backend after
the same seed. What a result may differ by is the error budget of ``_core/dtypes.py``, of what eager
torch in the same dtype gets and of how many terms the spec says are summed. The tests and
``fusedops doctor`` both ask here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedops._core import backends, dtypes
from fusedops._core.generators import seed_generators
from fusedops.specs.spec import Sample, Spec, tensors_in


@dataclass
class ComparisonResult:
    """Outputs of a call, the tensors of a plan among them, and the gradients of its leaves."""

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]


def floating(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs that must have a gradient: indices and counts have none."""
    return tuple(tensor for tensor in tensors_in(value) if tensor.is_floating_point())


def fresh(sample: Sample, dtype: torch.dtype | None = None) -> Sample:
    """Return the sample with new leaves, in another dtype if asked."""

    def renew(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().clone()
        if dtype is not None and new.is_floating_point():
            new = new.to(dtype)
        return new.requires_grad_(tensor.requires_grad)

    return sample.map(renew)


def incoming(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the incoming gradients: the same for every backend, with all digits of the output."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(output.shape, generator=generator).double() for output in outputs]
    # The factor adds digits that float32 does not have, and rounds to 1.
    return [
        (values * (1 + 2**-26)).to(output) for values, output in zip(drawn, outputs, strict=True)
    ]


def run(
    function: Callable[..., Any],
    sample: Sample,
    incoming: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]] = incoming,
    rounded_to: Sequence[torch.dtype] | None = None,
) -> ComparisonResult:
    """Call ``function`` on the sample and differentiate all outputs with respect to all leaves.

    Outputs that have no gradient, where only some tensors of the sample require one, are left out.
    ``incoming`` gives the incoming gradients of the floating outputs. They are rounded to the
    dtypes ``rounded_to`` first, for a call that is compared with one whose outputs have these.
    """
    seed_generators(11)
    outputs = tensors_in(function(*sample.args, **sample.kwargs))
    leaves, wide = sample.leaves, floating(outputs)
    received = incoming(wide)
    if rounded_to is not None:
        both = zip(received, rounded_to, strict=True)
        received = [grad.to(dtype).to(grad) for grad, dtype in both]
    pairs = [pair for pair in zip(wide, received, strict=True) if pair[0].requires_grad]
    grads: tuple[torch.Tensor, ...] = ()
    if leaves:
        differentiable, given = zip(*pairs, strict=True)
        grads = torch.autograd.grad(differentiable, leaves, given)
    return ComparisonResult([output.detach() for output in outputs], list(grads))


def output_dtypes(spec: Spec, sample: Sample) -> list[torch.dtype]:
    """Return the dtypes of the floating outputs of a call."""
    with torch.no_grad():
        outputs = _on_reference(spec.op, *sample.args, **sample.kwargs)
    return [output.dtype for output in floating(outputs)]


def truth(spec: Spec, sample: Sample) -> ComparisonResult:
    """Run the sample in float64: eager torch, or the reference for a random call."""
    return baseline(spec, fresh(sample, torch.float64), output_dtypes(spec, sample))


def baseline(
    spec: Spec, sample: Sample, rounded_to: Sequence[torch.dtype] | None = None
) -> ComparisonResult:
    """Run the sample in eager torch in its own dtype; a random call on the reference.

    ``rounded_to`` has the dtypes of the incoming gradients, where outputs do not have them.
    """
    function = functools.partial(_on_reference, spec.op) if sample.random else spec.eager
    return run(function, sample, rounded_to=rounded_to)


def difference_from_truth(actual: ComparisonResult, spec: Spec, sample: Sample) -> str | None:
    """Return the first output or gradient that is over its error budget, and where, or ``None``."""
    return difference_from_exact(
        actual, truth(spec, sample), baseline(spec, fresh(sample)), spec, sample
    )


def difference_of_mixture(spec: Spec, sample: Sample, *, loose: bool = False) -> str | None:
    """Run a call of any dtypes and return where it is over its error budget, or ``None``.

    Eager torch has no counterpart of many calls of several dtypes. The results must have the dtypes
    that the reference gives, and be no more wrong than eager torch is where all tensors have the
    least precise dtype among them, which inner values may have. The truth is eager float64.
    ``loose`` allows half of the digits of the largest value as well, for calls that nobody has
    looked at: where terms cancel, errors are as large as the terms and not as their sum.
    """
    got = run(spec.op, sample)
    with backends.use_backend("torch"):
        reference = run(spec.op, fresh(sample))
    given = [output.dtype for output in floating(reference.outputs)]
    try:
        least = baseline(spec, fresh(sample, sample.least_dtype), given)
    except TypeError:  # some tensor must have the dtype that it has
        least = reference
    base = ComparisonResult(
        [
            output.to(like.dtype)
            for output, like in zip(least.outputs, reference.outputs, strict=True)
        ],
        [grad.to(like.dtype) for grad, like in zip(least.grads, reference.grads, strict=True)],
    )
    exact = truth(spec, sample)
    inside = sample.least_dtype
    return difference_from_exact(got, exact, base, spec, sample, inside=inside, loose=loose)


def difference_from_exact(
    actual: ComparisonResult,
    exact: ComparisonResult,
    eager: ComparisonResult,
    spec: Spec,
    sample: Sample,
    inside: torch.dtype | None = None,
    loose: bool = False,
) -> str | None:
    """Return what ``difference_from_truth`` does, of a truth and a baseline that are given.

    ``exact`` is what the call should give, in float64, and ``eager`` what another implementation
    gets in its dtypes; ``inside`` and ``loose`` as in ``difference``.
    """
    depth = spec.depth(sample)
    inside = inside or spec.inner_dtype(sample)
    of_outputs = [depth.outputs] * len(exact.outputs)
    for kind, got, want, base, terms in (
        ("output", actual.outputs, exact.outputs, eager.outputs, of_outputs),
        ("gradient", actual.grads, exact.grads, eager.grads, list(depth.gradients)),
    ):
        if not len(got) == len(want) == len(terms):
            return f"{len(got)} {kind}s, wanted {len(want)} (the spec has depths for {len(terms)})"
        for index, values in enumerate(zip(got, want, base, strict=True)):
            message = difference(*values, terms[index], inside, loose)
            if message is not None:
                return f"{kind} {index}: {message}"
    return None


def _on_reference(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with backends.use_backend("torch"):
        return op(*args, **kwargs)


def difference(
    got: torch.Tensor,
    want: torch.Tensor,
    base: torch.Tensor,
    depth: int = 1,
    inside: torch.dtype | None = None,
    loose: bool = False,
) -> str | None:
    """Return how a tensor differs from its truth by more than its budget, or ``None``.

    The truth ``want`` is float64, and ``base`` what eager torch gets in the dtype of ``got``. Of
    ``depth`` terms an element is the sum, of values of the dtype ``inside`` (by default its own).
    ``loose`` allows half of the digits of the largest value to be wrong.
    """
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, wanted {list(want.shape)}"
    if got.dtype != base.dtype:
        return f"{got.dtype}, wanted {base.dtype}"
    if not got.is_floating_point():
        wrong = got != want
        if not wrong.any():
            return None
        return (
            f"{int(wrong.sum())} of {got.numel()} elements differ; the first is "
            f"{got[wrong][0].item()}, wanted {want[wrong][0].item()}"
        )
    budget = dtypes.error_budget(base, want, inside or got.dtype, depth=depth)
    if loose and want.numel() > 0:
        finite = want.abs().nan_to_num(0.0, 0.0, 0.0)
        digits = torch.finfo(inside or got.dtype).eps ** 0.5
        budget = budget + digits * finite.max().clamp_min(1.0)
    error = (got.double() - want).abs()
    same = (got.double() == want) | (got.isnan() & want.isnan())
    # Past the largest number of the dtype, or so near to it that the budget reaches past it.
    past = want.abs() + budget > torch.finfo(got.dtype).max
    same |= got.isinf() & past & (got.double().sign() == want.sign())
    excess = torch.where(same, torch.zeros_like(error), error - budget)
    wrong = (excess > 0) | (excess.isnan() & ~same)
    if not wrong.any():
        return None
    worst = torch.where(wrong, excess.nan_to_num(nan=math.inf), -math.inf).argmax()
    place = tuple(int(index) for index in torch.unravel_index(worst, got.shape))
    return (
        f"{int(wrong.sum())} of {got.numel()} elements are over the error budget; the worst, "
        f"{list(place)}, is {got[place]:.9g}, float64 has {want[place]:.9g}, eager torch "
        f"{base[place]:.9g}, allowed is an error of {budget[place]:.3g}"
    )
