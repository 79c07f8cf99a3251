"""Measures one op at one size: errors, memory, times of all contenders in all directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fusedops._core import dtypes
from fusedops.bench.contenders import Contender, ContenderCall, backend_of, contenders
from fusedops.bench.limits import LeastWork, Limits
from fusedops.bench.results import (
    BACKWARD,
    BOTH,
    COMPILE,
    DIRECTIONS,
    EAGER,
    FORWARD,
    BenchRow,
    dtype_name,
    is_ours,
)
from fusedops.bench.runner import BenchSettings
from fusedops.runtime.peak import peak_bytes
from fusedops.runtime.timer import CpuClock, Timing, TimingPlan, Variant, measure
from fusedops.specs import BenchCase, Sample, Spec, tensors_in

# Above this many elements a float64 copy of all intermediates would not fit in memory in addition.
_LARGEST_TRUTH = 1 << 28
# A call on fewer elements than this is all overhead, and too small to be split among threads.
_TINY = 1 << 13
_HOST_PLAN = TimingPlan(least=9, most=40, seconds=0.2)

Error = tuple[float, float]


def run_case(
    spec: Spec,
    case: BenchCase,
    dtype: torch.dtype,
    settings: BenchSettings,
    host_us: dict[tuple[str, str], float],
) -> tuple[list[BenchRow], list[str]]:
    """Measure all contenders at one size; return the rows, and notes on what could not run.

    ``host_us`` has the host overhead per contender and direction, from ``host_overhead``.
    """
    title = f"{spec.name} {case.label} {dtype_name(dtype)}"
    try:
        call = ContenderCall.of(spec, case.make(settings.device, dtype))
    except (RuntimeError, ValueError, LookupError) as error:
        # Too large for this machine, a dtype that eager does not have on this device, or sizes of
        # the user's own that do not fit together.
        message = repr(error) if isinstance(error, LookupError) else str(error)
        return [], [f"{title}: no rows: {message.strip().splitlines()[0]}"]
    if settings.compiled:
        settings.report("compiling")
    which: dict[str, Any] = {"only": settings.only, "all_backends": settings.all_backends}
    able, notes = contenders(spec, call, compiled=settings.compiled, **which)
    if not able:
        return [], [f"{title}: {note}" for note in notes]
    settings.report("errors")
    errors, why_no_error = _errors(spec, call, able)
    ours = [contender for contender in able if is_ours(contender.name)]
    ran = {contender.name: backend_of(contender, call) for contender in ours}
    rows = []
    for direction in _directions(able, call):
        settings.report(direction)
        variants = variants_of(able, call, direction)
        peaks = {variant.name: peak_of(variant, settings.device) for variant in variants}
        timing = measure(variants, settings.clock, settings.plan)
        work = least_work(case, direction, dtype, settings.limits)
        for name, peak in peaks.items():
            row = timed_row(
                timing,
                name,
                work,
                settings,
                errors.get((name, direction)),
                op=spec.name,
                case=case.label,
                dtype=dtype_name(dtype),
                direction=direction,
                backend=ran.get(name, ""),
                host_us=host_us.get((name, direction)),
                peak_bytes=peak,
                note=why_no_error,
                **trusted_fields(timing, name),
            )
            rows.append(row)
    return rows, [f"{title}: {note}" for note in notes]


def host_overhead(
    spec: Spec, dtype: torch.dtype, settings: BenchSettings
) -> dict[tuple[str, str], float]:
    """Return the least microseconds of a call on a tiny input, per contender and direction.

    On CUDA it is the time until the host may go on. torch.compile is left out: it would compile
    once more for the size.
    """
    sample = tiny_sample(spec, settings.device, dtype)
    if sample is None:
        return {}
    try:
        call = ContenderCall.of(spec, sample)
    except RuntimeError:
        return {}
    only = [name for name in settings.only if name != COMPILE]
    able, _ = contenders(spec, call, compiled=False, only=only, all_backends=settings.all_backends)
    overhead: dict[tuple[str, str], float] = {}
    for direction in _directions(able, call):
        variants = variants_of(able, call, direction, synced=settings.device)
        timing = measure(variants, CpuClock(), _HOST_PLAN)
        for variant in variants:
            overhead[variant.name, direction] = timing.best(variant.name) * 1e6
    return overhead


def tiny_sample(spec: Spec, device: torch.device, dtype: torch.dtype) -> Sample | None:
    """Return a call of the op that is all overhead: its first test sample of a tiny size."""
    for sample in spec.samples(device, dtype):
        # An empty tensor among others only carries a dtype or a size.
        sizes = [tensor.numel() for tensor in sample.leaves or sample.tensors if tensor.numel() > 0]
        if sizes and min(sizes) > 1 and sum(sizes) < _TINY:
            return sample
    return None


def least_work(case: BenchCase, direction: str, dtype: torch.dtype, limits: Limits) -> LeastWork:
    """Return what a direction has to do at least."""
    forward = (case.bytes_forward(dtype), case.flops_forward)
    backward = (case.bytes_backward(dtype), case.flops_backward)
    parts = {FORWARD: [forward], BACKWARD: [backward], BOTH: [forward, backward]}
    return LeastWork.of(parts[direction], dtype_name(dtype), limits)


def _directions(able: Sequence[Contender], call: ContenderCall) -> Sequence[str]:
    """Return what can be measured: without eager there is nothing to compare a backward with."""
    return DIRECTIONS if able and able[0].trains and call.leaves else (FORWARD,)


def timed_row(
    timing: Timing,
    variant: str,
    work: LeastWork,
    settings: BenchSettings,
    error: Error | None,
    **fields: Any,
) -> BenchRow:
    """Return the row of a variant: what follows from its times, and its other ``fields``."""
    spread, ratio = timing.spread(variant), timing.ratio(EAGER, variant)
    return BenchRow(
        variant=variant,
        allocator=settings.allocator,
        speedup=ratio.median,
        speedup_q1=ratio.q1,
        speedup_q3=ratio.q3,
        median_us=spread.median * 1e6,
        q1_us=spread.q1 * 1e6,
        q3_us=spread.q3 * 1e6,
        samples=spread.count,
        discarded=timing.discarded(variant),
        gb_per_s=work.bytes_moved / spread.median * 1e-9,
        tflop_per_s=work.flops / spread.median * 1e-12 if work.flops else None,
        limit_share=work.least_seconds / spread.median,
        in_cache=work.in_memory and work.bytes_moved < 2 * settings.cache_bytes,
        error_max_ulps=error[0] if error else None,
        error_mean_ulps=error[1] if error else None,
        **fields,
    )


def lead(timing: Timing, variant: str) -> dict[str, Any]:
    """Return the fields of a row of ours that compare it with the fastest other."""
    if not is_ours(variant):
        return {}
    others = [name for name in timing.rounds if not is_ours(name)]
    rival = min(others, key=lambda name: timing.spread(name).median)
    ratio = timing.ratio(rival, variant)
    return {"rival": rival, "lead": ratio.median, "lead_q1": ratio.q1, "lead_q3": ratio.q3}


def variants_of(
    able: Sequence[Contender],
    call: ContenderCall,
    direction: str,
    synced: torch.device | None = None,
) -> list[Variant]:
    """Return what the timer runs in one direction: of those that have no backward, the forward."""
    variants = []
    for contender in able:
        if direction == FORWARD or contender.trains:
            prepare, run = _prepared(contender, call, direction)
            context = partial(_synced, contender, synced)
            variants.append(Variant(contender.name, run, prepare, context))
    return variants


def _prepared(
    contender: Contender, call: ContenderCall, direction: str
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return what makes the input of a run, and the run."""
    function, given = contender.function, partial(call.given_to, contender)
    if direction == FORWARD:
        return given, lambda mine: mine.forward(function)
    if direction == BOTH:
        return given, lambda mine: mine.backward(mine.forward(function))

    def ran() -> tuple[ContenderCall, Any]:
        mine = given()
        return mine, mine.forward(function)

    return ran, lambda both: both[0].backward(both[1])


def trusted_fields(timing: Timing, variant: str) -> dict[str, Any]:
    """Return whether a row can be trusted, and its lead unless the rival was disturbed."""
    against = lead(timing, variant)
    if against and not timing.trusted(against["rival"]):
        against = {}
    return {"trusted": timing.trusted(variant) and timing.trusted(EAGER), **against}


@contextlib.contextmanager
def _synced(contender: Contender, device: torch.device | None) -> Iterator[None]:
    """Enter the contender's context; on CUDA start with an empty launch queue if asked."""
    with contender.context():
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        yield


def peak_of(variant: Variant, device: torch.device) -> int:
    """Return the bytes of a run above those before it."""
    with variant.context():
        value = variant.prepare()
        return peak_bytes(lambda: variant.run(value), device)


def _errors(
    spec: Spec, call: ContenderCall, able: Sequence[Contender]
) -> tuple[dict[tuple[str, str], Error], str]:
    """Return the errors per contender and direction, and why some have none.

    The truth of a random call is the reference in float64 after the same seed; what other
    libraries draw cannot be predicted.
    """
    if sum(leaf.numel() for leaf in call.leaves) > _LARGEST_TRUTH:
        return {}, "error not measured: float64 would need too much memory"
    random = call.sample.random
    reference = Contender("truth", spec.op, "torch") if random else Contender(EAGER, spec.eager)
    truth, true_grads = _seeded(reference, call.double())
    errors: dict[tuple[str, str], Error] = {}
    for contender in able:
        if random and not is_ours(contender.name):
            continue
        outputs, grads = _seeded(contender, call)
        forward = ulps(outputs, truth)
        errors[contender.name, FORWARD] = forward
        if grads:
            errors[contender.name, BACKWARD] = backward = ulps(grads, true_grads)
            errors[contender.name, BOTH] = max(forward, backward)
    return errors, "error of random results only for fusedops" if random else ""


def _seeded(
    contender: Contender, call: ContenderCall
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """Return results and gradients of a call after a fixed seed."""
    torch.manual_seed(0)
    call = call.given_to(contender)
    with contender.context():
        outputs = call.forward(contender.function)
        grads = call.backward(outputs) if call.leaves and contender.trains else ()
    return tuple(output.detach() for output in tensors_in(outputs)), grads


def ulps(actual: Sequence[torch.Tensor | None], truth: Sequence[torch.Tensor | None]) -> Error:
    """Return the largest and the mean error over some tensors."""
    largest: list[float] = []
    total, count = 0.0, 0
    for value, true in zip(actual, truth, strict=True):
        if value is None or true is None or not value.dtype.is_floating_point or not true.numel():
            continue
        error = dtypes.ulps(value.detach(), true)
        largest.append(float(error.max()))
        total += float(error.sum())
        count += error.numel()
    # Of torch, because ``max`` of Python passes over NaN.
    return float(torch.tensor([0.0, *largest], dtype=torch.float64).max()), total / max(1, count)
