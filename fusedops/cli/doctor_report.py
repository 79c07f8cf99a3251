"""What ``fusedops doctor`` finds and prints: installation, host, the test of every op, rates.

Each op runs on its small samples, whose values and gradients are compared with float64: the same
samples and error budget as the project's tests, but only the automatic choice of backend and the
common dtypes. ``--calibrate`` compares the speed of ops with torch in two seconds: a first look at
what ``patch(model, example=batch, calibrate=True)`` decides module by module. ``fusedops bench`` is
the measurement to quote.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from fusedops import cpu, specs
from fusedops._core import backends, env, extension
from fusedops.bench import machine
from fusedops.bench.contenders import ContenderCall, backends_since, error_line, first_line
from fusedops.bench.results import AUTOMATIC, EAGER, dtype_name
from fusedops.ops.linear_act import linear_act
from fusedops.runtime import host
from fusedops.runtime.timer import BriefClock, Clock, TimingPlan, Variant, clock_for, measure
from fusedops.specs import BenchCase, Sample, Spec
from fusedops.specs.comparison import difference_from_truth, fresh, run
from fusedops.specs.recorder import RecordOps
from fusedops.terminal.console import DISTURBED, number_columns, show_table
from fusedops.terminal.progress import steps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of all self-tests on one device: a doctor must not keep the patient waiting.
_SECONDS = 24.0


@dataclass(frozen=True)
class SelftestResult:
    """What the self-test of one op found."""

    op: str  # the op's name
    # per dtype name, the backend that runs here and why not the ones before it
    runs_on: dict[str, str]
    checks: int  # how many calls were compared
    skipped: int  # how many were not, because the time was over
    failures: tuple[str, ...]  # one sentence per difference or exception
    seconds: float  # how long it took


def check_op(spec: Spec, device: torch.device, seconds: float = math.inf) -> SelftestResult:
    """Run the self-test of one op on a device.

    After ``seconds`` the rest is skipped; the first sample of each dtype always runs.
    """
    start = time.perf_counter()
    runs_on: dict[str, str] = {}
    failures = []
    checks = skipped = 0
    for index, dtype in enumerate(DTYPES, start=1):
        deadline = start + seconds * index / len(DTYPES)
        name = dtype_name(dtype)
        try:
            samples = spec.samples(device, dtype)
            runs_on[name] = _resolution(spec, samples)
        except Exception as error:
            failures.append(f"{spec.name} {name}: {error_line(error)}")
            continue
        for number, sample in enumerate(samples):
            if number > 0 and time.perf_counter() > deadline:
                skipped += len(samples) - number
                break
            checks += 1
            try:
                wrong = difference_from_truth(run(spec.op, fresh(sample)), spec, sample)
            except Exception as error:
                wrong = error_line(error)
            if wrong is not None:
                failures.append(f"{spec.name} {name} {sample.name}: {wrong}")
    elapsed = time.perf_counter() - start
    return SelftestResult(spec.name, runs_on, checks, skipped, tuple(failures), elapsed)


def _resolution(spec: Spec, samples: list[Sample]) -> str:
    """Return which backend runs the op's first non-empty sample, and why not a better one."""
    given = next(sample for sample in samples if all(tensor.numel() for tensor in sample.leaves))
    with RecordOps() as recorded:
        outputs = spec.op(*given.args, **given.kwargs)
        if given.leaves:
            ContenderCall.of(spec, given).backward(outputs)
    parts = []
    for operator, args in recorded.calls:
        name = operator._opname.removesuffix("_backward")
        if name in backends.op_names():
            backward = operator._opname != name
            parts.append(str(backends.resolve(name, *args, backward=backward)))
    return "; ".join(dict.fromkeys(parts))


def installation(devices: list[torch.device]) -> dict[str, Any]:
    """Return what is printed above the ops, as JSON holds it."""
    return {
        "versions": machine.versions(),
        "source": machine.git_commit(),
        "machines": [machine.describe(device) for device in devices],
        "kernels": _kernels(),
        "environment": env.settings(),
        "warnings": [*env.unknown(), *env.mistakes(backends.BACKENDS)],
        "host": [asdict(finding) for finding in host.inspect_host()],
    }


def _kernels() -> dict[str, str]:
    """Return for each kind of kernels whether it is usable, and the reason where it is not."""
    reasons = {
        "C++ kernels": extension.cpu_library(),
        "CUDA kernels": extension.cuda_library(),
        "Triton kernels": extension.triton_missing(),
    }
    if not reasons["C++ kernels"]:
        reasons["AMX tiles"] = torch.ops.fusedops_native.why_no_tiles()
    states = {name: f"no: {reason}" if reason else "usable" for name, reason in reasons.items()}
    if not reasons["C++ kernels"]:
        states["C++ kernels"] = f"loaded, run on {torch.ops.fusedops_native.isa_in_use()}"
        states["torch products"] = cpu.state()
    return states


def show_installation(out: Console, record: dict[str, Any]) -> None:
    """Print versions, kernels, environment, and what of the host costs speed."""
    versions = record["versions"]
    here = machine.machine(torch.device("cpu"))
    gpu = "none that this torch sees"
    if torch.cuda.is_available():
        card = machine.machine(torch.device("cuda"))
        gpu = f"{card.name}, CUDA {versions['cuda']}, driver {versions['driver']}"
    packages = ("python", "torch", "fusedops", "triton", "transformers", "liger-kernel")
    lines = [("CPU", f"{here.name} ({here.slug})"), ("GPU", gpu)]
    lines += [(package, versions.get(package, "not installed")) for package in packages]
    lines += record["kernels"].items()
    lines += [("environment", f"{name}={value}") for name, value in record["environment"].items()]
    out.rule("installed", align="left")
    for name, state in lines:
        out.print(f"  {name:14} {state}", markup=False)
    for message in record["warnings"]:
        out.print(f"  {'':14} {message}", style="yellow", markup=False)
    out.rule("host", align="left")
    for finding in record["host"]:
        mark = "[green]good[/]" if finding["good"] else "[yellow]slow[/]"
        out.print(f"  {mark}   {finding['setting']}: {finding['state']}")
        if not finding["good"]:
            out.print(f"         cost: {finding['cost']}", style="dim")
            if finding["cure"]:
                out.print(f"         cure: {finding['cure']}")


def show_ops(out: Console, device: torch.device) -> list[SelftestResult]:
    """Test every op; print what it runs on and whether it is right."""
    out.rule(f"ops on {device.type}", align="left")
    known = specs.all_specs()
    outcomes = []
    with steps(len(known)) as progress:
        start = time.perf_counter()
        for number, spec in enumerate(known.values(), start=1):
            progress.describe(f"testing {spec.name}")
            # What the ops before it left over is its own.
            deadline = start + _SECONDS * number / len(known)
            with warnings.catch_warnings():
                # Of what is compared with: eager torch tells that it has no fast path.
                warnings.simplefilter("ignore")
                outcomes.append(check_op(spec, device, deadline - time.perf_counter()))
            progress.advance()
    for outcome in outcomes:
        _show_outcome(out, outcome)
    total, checks, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("seconds", "checks", "skipped")
    )
    rest = f" ({skipped} more skipped: this machine is busy)" if skipped else ""
    out.print(
        f"  {checks} calls compared with float64, values and gradients, in {total:.1f} s{rest}"
    )
    return outcomes


def show_conclusion(out: Console, failed: list[SelftestResult]) -> None:
    """Print what an op that failed means."""
    if any(outcome.checks for outcome in failed):
        out.print("[red]An op gives wrong results here: see above.[/]")
        return
    out.print("[red]An op does not run here: see above.[/]")
    if backends.requested() is not None:
        cure = "unset FUSEDOPS_BACKEND for the automatic choice"
        out.print(f"Backend {backends.requested()} is asked for: {cure}.", markup=False)


def _show_outcome(out: Console, outcome: SelftestResult) -> None:
    mark = "[green]right[/]"
    if outcome.failures:
        mark = "[red]WRONG[/]" if outcome.checks else "[red]fails[/]"
    backends = list(dict.fromkeys(outcome.runs_on.values()))
    where = ", ".join(f"{dtype}: {backend}" for dtype, backend in outcome.runs_on.items())
    if len(backends) == 1:
        where = backends[0]
    ran = f"runs on {where}" if where else "does not run"
    out.print(f"  {mark}  {outcome.op:21} {ran}")
    for failure in outcome.failures:
        out.print(f"         {failure}", style="red", markup=False)


# Rows, and the layer of 768 -> 3072 of a base model: a batch, and a token of decoding.
PRODUCTS = ((256, 768, 3072), (1, 768, 3072))
# One op for each kind of module that patching replaces, in addition to products.
OPS = (
    *("gelu", "swiglu", "bias_dropout_add", "layer_norm", "rms_norm"),
    *("add_layer_norm", "add_rms_norm", "rotary_embedding", "scaled_masked_softmax", "attention"),
)
# Seconds for all rows of a device; each has an equal share of what those before it left.
BUDGET = 2.0
_MOST_ROUNDS = 9
# What a run may take, estimated by rates that any processor of the last ten years has.
_LONGEST, _BYTES_PER_SECOND, _FLOPS = 12e-3, 8e9, 5e10
# A token's weights come from memory while a model generates: no cache holds these together.
_BEYOND_CACHES = 96 << 20
_BATCH = 16


@dataclass(frozen=True)
class Rate:
    """The speed of one of our ops compared with torch."""

    what: str  # product or op, with its size
    dtype: str  # of its inputs
    ratio: float | None = None  # time of torch's divided by ours
    trusted: bool = True  # whether nothing else disturbed it, in more rounds than one
    runs_on: str = ""  # the backends that ran
    gflops: tuple[float, ...] = ()  # of a product, ours and torch's in GFLOP/s
    problem: str = ""  # why it was not measured


def show_rates(out: Console, device: torch.device) -> None:
    """Measure products and ops on a device in two seconds, and print a table of each."""
    clock = BriefClock(clock_for(device))
    work: list[Callable[[float], Rate]] = [
        partial(product_rate, sizes, dtype, device, clock) for dtype in DTYPES for sizes in PRODUCTS
    ]
    work += [partial(op_rate, name, dtype, device, clock) for dtype in DTYPES for name in OPS]
    with steps(len(work)) as progress:
        rates: list[Rate] = []
        ends = time.perf_counter() + BUDGET
        for measured in work:
            rates.append(measured((ends - time.perf_counter()) / (len(work) - len(rates))))
            progress.done(f"{rates[-1].what} {rates[-1].dtype}")
    products = [rate for rate in rates if rate.what.startswith("linear")]
    _show_rates(out, "products: linear_act and F.linear, forward", products)
    others = [rate for rate in rates if rate not in products]
    _show_rates(out, "ops and eager torch, forward and backward", others)
    if not all(rate.trusted for rate in rates):
        out.print(
            "  disturbed: by other work on this machine, or a single round; `fusedops bench` has\n"
            "  more time"
        )
    out.print(
        "  above 1 ours is faster; fusedops.patch(model, example=batch, calibrate=True) measures\n"
        "  the modules of a model like this, and leaves alone what is slower here"
    )


def product_rate(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    seconds: float = BUDGET,
) -> Rate:
    """Return the rate of a linear layer of rows, columns and outputs, ours and torch's."""
    rows, columns, outputs = sizes
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.randn(outputs, columns, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    copies = 1 if rows >= _BATCH else -(-_BEYOND_CACHES // (weight.numel() * weight.itemsize))
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def over(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        others = itertools.cycle(weights)
        return lambda: function(next(others))

    with torch.no_grad():
        return _rate(
            f"linear {rows}x{columns}->{outputs}",
            dtype,
            over(lambda weight: linear_act(x, weight, bias, activation="identity")),
            over(lambda weight: F.linear(x, weight, bias)),
            clock,
            seconds,
            2 * rows * columns * outputs,
        )


def affordable(cases: tuple[BenchCase, ...]) -> BenchCase:
    """Return the largest of these sizes that takes about two milliseconds, or the smallest."""

    def seconds(case: BenchCase) -> float:
        moved = case.bytes_forward(torch.float32) + case.bytes_backward(torch.float32)
        flops = case.flops_forward + case.flops_backward
        return moved / _BYTES_PER_SECOND + flops / _FLOPS

    smallest, *others = sorted(cases, key=seconds)
    return next((case for case in reversed(others) if seconds(case) <= _LONGEST), smallest)


def op_rate(
    name: str, dtype: torch.dtype, device: torch.device, clock: Clock, seconds: float = BUDGET
) -> Rate:
    """Return how an op compares with what its spec calls eager, forward and backward."""
    spec = specs.all_specs()[name]
    case = affordable(spec.bench_cases)
    what = f"{name} {case.label}"
    try:
        call = ContenderCall.of(spec, case.make(device, dtype))
    except RuntimeError as error:
        return Rate(what, dtype_name(dtype), problem=first_line(error))

    def over(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: call.backward(call.forward(function))

    return _rate(what, dtype, over(spec.op), over(spec.eager), clock, seconds)


def _rate(
    what: str,
    dtype: torch.dtype,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    clock: Clock,
    seconds: float,
    work: int = 0,
) -> Rate:
    before = backends.counters()
    start = time.perf_counter()
    try:
        ours()
        ran = backends_since(before)
        variants = [Variant(EAGER, lambda _: theirs()), Variant(AUTOMATIC, lambda _: ours())]
        rounds = max(0.0, seconds - (time.perf_counter() - start))
        timing = measure(variants, clock, TimingPlan(1, _MOST_ROUNDS, rounds))
    except RuntimeError as error:
        return Rate(what, dtype_name(dtype), problem=first_line(error))
    rates = (work / timing.spread(name).median * 1e-9 for name in (AUTOMATIC, EAGER))
    return Rate(
        what,
        dtype_name(dtype),
        timing.ratio(EAGER, AUTOMATIC).median,
        timing.trusted(EAGER) and timing.trusted(AUTOMATIC) and len(timing.rounds[EAGER]) > 1,
        ran,
        tuple(rates) if work else (),
    )


def _show_rates(out: Console, title: str, rates: list[Rate]) -> None:
    names = ("ours GFLOP/s", "torch GFLOP/s") if any(rate.gflops for rate in rates) else ()
    cells = []
    for row in rates:
        gflops, ratio = ["-"] * len(names), "-"
        if row.ratio is not None and not row.trusted:
            ratio = DISTURBED
        elif row.ratio is not None:
            gflops = [f"{rate:.0f}" for rate in row.gflops]
            ratio = f"[{'green' if row.ratio > 1 else 'red'}]{row.ratio:.2f}[/]"
        cells.append((row.what, row.dtype, *gflops, ratio, row.problem or row.runs_on))
    columns = ("", "dtype", *number_columns(*names, "x torch"), "runs on")
    show_table(out, columns, cells, title=title, title_justify="left")
