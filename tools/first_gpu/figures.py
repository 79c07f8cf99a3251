"""Measures figures with the code of ``fusedops bench``, and writes a row for each."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from first_gpu.figure_list import FIGURES, OPTIMIZER, Figure
from first_gpu.plugin import error_of_context
from fusedops.bench.cases import host_overhead, lead, least_work, variants_of
from fusedops.bench.contenders import ContenderCall, contenders, error_line
from fusedops.bench.limits import LeastWork, measure_limits
from fusedops.bench.machine import machine
from fusedops.bench.results import AUTOMATIC, COMPILE, DIRECTIONS, EAGER, FORWARD
from fusedops.bench.runner import BenchSettings
from fusedops.optim import AdamW
from fusedops.runtime.timer import Timing, TimingPlan, Variant, clock_for, measure
from fusedops.specs import all_specs

DTYPE = torch.bfloat16
PLAN = TimingPlan(least=7, most=40, seconds=0.5)
Row = dict[str, Any]


def main() -> int:
    """Measure the figures that are asked for, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="+", choices=sorted(FIGURES), metavar="FIGURE")
    parser.add_argument("--rows", type=Path, required=True, help="file that gets lines of JSON")
    options = parser.parse_args()
    settings = settings_of(torch.device("cuda"), PLAN)
    for name in options.figures:
        result = measured(FIGURES[name], settings)
        with options.rows.open("a") as file:
            file.write(json.dumps({"test": name, **result}) + "\n")
        if error_of_context():
            return 1
        torch.cuda.empty_cache()
    return 0


def settings_of(device: torch.device, plan: TimingPlan) -> BenchSettings:
    """Return the settings of the benchmark; the limits of the machine are measured."""
    clock = clock_for(device)
    return BenchSettings(
        device=device,
        clock=clock,
        plan=plan,
        limits=measure_limits(device, [DTYPE, torch.float32], clock),
        compiled=True,
        allocator="system",
        cache_bytes=machine(device).cache_bytes,
        report=lambda message: None,
    )


def measured(figure: Figure, settings: BenchSettings) -> Row:
    """Return the outcome of a figure, with its rows or with the reason why there are none."""
    try:
        measure_rows = optimizer_rows if figure.op == OPTIMIZER else op_rows
        return {"outcome": "passed", "rows": measure_rows(figure, settings)}
    except Exception as error:
        reason, text = error_of_context() or error_line(error), traceback.format_exc()[-4096:]
        return {"outcome": "failed", "error": reason, "text": text}


def row(
    figure: Figure,
    case: str,
    direction: str,
    timing: Timing,
    work: LeastWork,
    host_us: float | None,
) -> Row:
    """Return the row of ours, with how much of its mark it reaches."""
    us = {name: 1e6 * timing.spread(name).median for name in timing.rounds}
    limit_share, of_mark = 1e6 * work.least_seconds / us[AUTOMATIC], None
    if figure.mark is not None:
        against, factor = figure.mark
        if against == "limit":
            of_mark = limit_share / factor
        elif against in us:
            of_mark = timing.ratio(against, AUTOMATIC).median / factor
    known = {"op": figure.op, "case": case, "direction": direction, "us": us, "host_us": host_us}
    compared = lead(timing, AUTOMATIC)
    return known | {"limit_share": limit_share, "of_mark": of_mark} | compared


def op_rows(figure: Figure, settings: BenchSettings) -> list[Row]:
    """Return a row for each direction of an op."""
    spec = all_specs()[figure.op]
    assert spec.bench_case is not None
    case = spec.bench_case(*figure.sizes)
    call = ContenderCall.of(spec, case.make(settings.device, DTYPE))
    compiled, only = COMPILE in figure.rivals, [AUTOMATIC, *figure.rivals]
    able, notes = contenders(spec, call, compiled=compiled, only=only)
    if AUTOMATIC not in [contender.name for contender in able]:
        raise RuntimeError("; ".join(notes))
    host_us = host_overhead(spec, DTYPE, replace(settings, only=only))
    rows = []
    for direction in DIRECTIONS if call.leaves else (FORWARD,):
        variants = variants_of(able, call, direction)
        if {AUTOMATIC, EAGER} <= {variant.name for variant in variants}:
            timing = measure(variants, settings.clock, settings.plan)
            work = least_work(case, direction, DTYPE, settings.limits)
            host = host_us.get((AUTOMATIC, direction))
            rows.append(row(figure, case.label, direction, timing, work, host))
    return rows


def optimizer_rows(figure: Figure, settings: BenchSettings) -> list[Row]:
    """Return the row of a step of AdamW over float32 tensors of one size."""
    count, size = map(int, figure.sizes)

    def parameters() -> list[torch.nn.Parameter]:
        made = [torch.randn(size, device=settings.device) for _ in range(count)]
        params = list(map(torch.nn.Parameter, made))
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        return params

    ours, fused = AdamW(parameters()), torch.optim.AdamW(parameters(), fused=True)
    steps = {AUTOMATIC: ours.step, EAGER: fused.step}
    variants = [Variant(name, lambda _, step=step: step()) for name, step in steps.items()]
    timing = measure(variants, settings.clock, settings.plan)
    moved = 7 * 4 * count * size  # reads parameter, gradient, two moments; writes all but one
    work = LeastWork.of([(moved, 0)], "float32", settings.limits)
    return [row(figure, f"{count}x{size}", FORWARD, timing, work, None)]


if __name__ == "__main__":
    sys.exit(main())
