"""``fusedops doctor --calibrate``: the speed of ops on this machine relative to torch.

A first look in two seconds at what ``patch(model, example=batch, calibrate=True)`` decides module
by module. ``fusedops bench`` is the measurement to quote.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from fusedops._core import backends
from fusedops.bench.contenders import ContenderCall, backends_since, first_line
from fusedops.bench.results import AUTOMATIC, EAGER, dtype_name
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
    gflops: tuple[float, ...] = ()  # of a product, ours and torch's in GFLOP/s
    problem: str = ""  # why it was not measured


def show(out: Console, device: torch.device) -> None:
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
    spec = all_specs()[name]
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
