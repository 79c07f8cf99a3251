"""``fusedops doctor --calibrate``: the speed of ops on this machine relative to torch.

A first look in two seconds at what ``patch(model, example=batch, calibrate=True)`` decides module
by module. ``fusedops bench`` is the measurement to quote.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from fusedops._core import backends
from fusedops.bench.contenders import (
    AUTOMATIC,
    EAGER,
    Contender,
    ContenderCall,
    backend_of,
    backends_since,
    first_line,
)
from fusedops.bench.results import dtype_name
from fusedops.ops.linear_act import linear_act
from fusedops.runtime.timer import BriefClock, Clock, TimingPlan, Variant, clock_for, measure
from fusedops.specs import BenchCase, all_specs
from fusedops.terminal.console import DISTURBED, number_columns, show_table
from fusedops.terminal.progress import steps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
    gflops: tuple[float, float] | None = None  # of a product, ours and torch's in GFLOP/s
    problem: str = ""  # why it was not measured


def show(out: Console, device: torch.device) -> None:
    """Measure products and ops on a device in two seconds, and print a table of each."""
    clock = BriefClock(clock_for(device))
    work = [*_products(device, clock), *_ops(device, clock)]
    with steps(len(work)) as progress:
        rates: list[Rate] = []
        ends = time.perf_counter() + BUDGET
        for title, measured in work:
            progress.describe(title)
            share = (ends - time.perf_counter()) / (len(work) - len(rates))
            rates.append(measured(share))
            progress.advance()
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


# A row's title, and what measures it in so many seconds.
Work = tuple[str, Callable[[float], Rate]]


def _products(device: torch.device, clock: Clock) -> Iterator[Work]:
    for dtype in DTYPES:
        for sizes in PRODUCTS:
            rows, columns, outputs = sizes
            what = f"linear {rows}x{columns}->{outputs}"
            measured = partial(product_rate, what, sizes, dtype, device, clock)
            yield f"{what} {dtype_name(dtype)}", measured


def product_rate(
    what: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    seconds: float = BUDGET,
) -> Rate:
    """Return the rate of a linear layer, ours and torch's."""
    rows, columns, outputs = sizes
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.randn(outputs, columns, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    copies = 1 if rows >= _BATCH else -(-_BEYOND_CACHES // (weight.numel() * weight.itemsize))
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def over(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        others = itertools.cycle(weights)
        return lambda: function(next(others))

    ours = over(lambda weight: linear_act(x, weight, bias, activation="identity"))
    theirs = over(lambda weight: F.linear(x, weight, bias))
    work = 2 * rows * columns * outputs
    with torch.no_grad():
        return _rate(what, dtype, ours, theirs, clock, seconds, work)


def _ops(device: torch.device, clock: Clock) -> Iterator[Work]:
    specs = all_specs()
    for dtype in DTYPES:
        for name in OPS:
            case = affordable(specs[name].bench_cases)
            measured = partial(op_rate, name, case, dtype, device, clock)
            yield f"{name} {case.label} {dtype_name(dtype)}", measured


def affordable(cases: tuple[BenchCase, ...]) -> BenchCase:
    """Return the largest of these sizes that takes about two milliseconds, or the smallest."""

    def seconds(case: BenchCase) -> float:
        moved = case.bytes_forward(torch.float32) + case.bytes_backward(torch.float32)
        flops = case.flops_forward + case.flops_backward
        return moved / _BYTES_PER_SECOND + flops / _FLOPS

    ordered = sorted(cases, key=seconds)
    return next(
        (candidate for candidate in reversed(ordered) if seconds(candidate) <= _LONGEST), ordered[0]
    )


def op_rate(
    name: str,
    case: BenchCase,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    seconds: float = BUDGET,
) -> Rate:
    """Return how an op compares with what its spec calls eager, forward and backward."""
    spec = all_specs()[name]
    what = f"{name} {case.label}"
    try:
        call = ContenderCall.of(spec, case.make(device, dtype))
    except RuntimeError as error:
        return Rate(what, dtype_name(dtype), problem=first_line(error))
    return _rate(
        what,
        dtype,
        lambda: call.backward(call.forward(spec.op)),
        lambda: call.backward(call.forward(spec.eager)),
        clock,
        seconds,
        runs_on=backend_of(Contender(AUTOMATIC, spec.op), call),
    )


def _rate(
    what: str,
    dtype: torch.dtype,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    clock: Clock,
    seconds: float,
    work: int = 0,
    runs_on: str = "",
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
    rates = [work / timing.spread(name).median * 1e-9 for name in (AUTOMATIC, EAGER)]
    return Rate(
        what,
        dtype_name(dtype),
        timing.ratio(EAGER, AUTOMATIC).median,
        timing.trusted(EAGER) and timing.trusted(AUTOMATIC) and len(timing.rounds[EAGER]) > 1,
        runs_on or ran,
        (rates[0], rates[1]) if work else None,
    )


def _show_rates(out: Console, title: str, rates: list[Rate]) -> None:
    with_rates = any(rate.gflops for rate in rates)
    rate_names = ("ours GFLOP/s", "torch GFLOP/s") if with_rates else ()
    cells = []
    for row in rates:
        gflops, ratio = ["-"] * len(rate_names), "-"
        if row.ratio is not None and not row.trusted:
            ratio = DISTURBED
        elif row.ratio is not None:
            gflops = [f"{rate:.0f}" for rate in row.gflops or ()]
            ratio = f"[{'green' if row.ratio > 1 else 'red'}]{row.ratio:.2f}[/]"
        cells.append((row.what, row.dtype, *gflops, ratio, row.problem or row.runs_on))
    columns = ("", "dtype", *number_columns(*rate_names, "x torch"), "runs on")
    show_table(out, columns, cells, title=title, title_justify="left")
