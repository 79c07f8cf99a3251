"""Measures the figures of one group: ours beside rivals, with the benchmark's timer.

The limits of the machine, a copy and a product of 8192 x 8192 x 8192, are measured by the first
process and read by the others. A rival that cannot run a figure is named with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from first_gpu.figure_list import FIGURES, FORWARD, Figure
from first_gpu.plugin import error_of_context
from fusedops.bench.cases import least_work, variants_of
from fusedops.bench.contenders import (
    Contender,
    ContenderCall,
    admitted,
    backend_of,
    error_line,
    peers_of,
)
from fusedops.bench.limits import LeastWork, Limit, Limits, measure_limits
from fusedops.optim import AdamW
from fusedops.runtime.timer import Clock, CpuClock, Timing, TimingPlan, Variant, clock_for, measure
from fusedops.specs import Sample, Spec, all_specs

OURS = "fusedops"
DTYPE = torch.bfloat16
_PLAN = TimingPlan(least=7, most=40, seconds=0.5)
Row = dict[str, Any]


def main() -> int:
    """Measure the figures that are asked for, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="+", choices=sorted(FIGURES), metavar="FIGURE")
    parser.add_argument("--limits", type=Path, required=True, help="file of the machine's limits")
    parser.add_argument("--rows", type=Path, required=True, help="file that gets lines of JSON")
    options = parser.parse_args()
    device = torch.device("cuda")
    clock = clock_for(device)
    limits = _limits(options.limits, device, clock)
    for name in options.figures:
        result = measured(FIGURES[name], device, clock, limits)
        with options.rows.open("a") as file:
            file.write(json.dumps({"test": name, **result}) + "\n")
        if error_of_context():
            return 1
        torch.cuda.empty_cache()
    return 0


def measured(
    figure: Figure, device: torch.device, clock: Clock, limits: Limits, backend: str | None = None
) -> Row:
    """Return the outcome of a figure, with its rows or with the reason why there are none."""
    try:
        if figure.op == "optimizer":
            rows = measure_optimizer(figure, device, clock, limits)
        else:
            rows = measure_op(figure, device, clock, limits, backend)
    except Exception as error:
        reason, text = error_of_context() or error_line(error), traceback.format_exc()[-4096:]
        return {"outcome": "failed", "error": reason, "text": text}
    return {"outcome": "passed", "rows": [{**row, "figure": figure.name} for row in rows]}


def _limits(path: Path, device: torch.device, clock: Clock) -> Limits:
    """Return the limits of this machine: read, or measured and written."""
    if not path.exists():
        measured = measure_limits(device, [DTYPE], clock)
        path.write_text(json.dumps(dataclasses.asdict(measured)))
    known = json.loads(path.read_text())
    matmul = {name: Limit(**limit) for name, limit in known["matmul"].items()}
    return Limits(Limit(**known["copy"]), matmul)


def measure_op(
    figure: Figure, device: torch.device, clock: Clock, limits: Limits, backend: str | None = None
) -> list[Row]:
    """Return a row for each direction of a figure.

    Args:
        figure: which.
        device: where.
        clock: of the device.
        limits: of the machine.
        backend: that runs ours; ``None``: the automatic choice.
    """
    spec = all_specs()[figure.op]
    assert spec.bench_case is not None
    case = spec.bench_case(*figure.sizes, **figure.options)
    sample = _with_slopes(case.make(device, DTYPE)) if figure.alibi else case.make(device, DTYPE)
    call = ContenderCall.of(replace(spec, eager=spec.op), sample)
    notes: list[str] = []
    backward = set(figure.directions) != {FORWARD}
    candidates = [Contender(OURS, spec.op, backend), *_rivals(figure, spec)]
    passed = [admitted(candidate, call, notes, backward=backward) for candidate in candidates]
    if passed[0] is None:
        raise RuntimeError(f"ours does not run: {notes[0]}")
    able = [contender for contender in passed if contender]
    ran = backend_of(passed[0], call)
    rows = []
    for direction in figure.directions:
        variants = variants_of(able, call, direction, synced=device if figure.host else None)
        timing = measure(variants, CpuClock() if figure.host else clock, _PLAN)
        work = None if figure.host else least_work(case, direction, DTYPE, limits)
        rows.append(_row(figure, direction, timing, work, ran, "; ".join(notes)))
    return rows


def measure_optimizer(
    figure: Figure, device: torch.device, clock: Clock, limits: Limits
) -> list[Row]:
    """Return the row of a step of AdamW over float32 tensors of one size beside torch's fused."""
    count, size = (int(value) for value in figure.sizes)

    def made() -> list[torch.nn.Parameter]:
        params = [torch.nn.Parameter(torch.randn(size, device=device)) for _ in range(count)]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        return params

    steps: dict[str, Callable[[], Any]] = {
        OURS: AdamW(made(), lr=1e-4).step,
        "torch fused": torch.optim.AdamW(made(), lr=1e-4, fused=True).step,
    }

    def waits() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    variants = [
        Variant(name, lambda _, step=step: step(), waits if figure.host else lambda: None)  # type: ignore[misc]
        for name, step in steps.items()
    ]
    timing = measure(variants, CpuClock() if figure.host else clock, _PLAN)
    moved = 7 * 4 * count * size  # reads parameter, gradient, two moments; writes all but one
    work = None if figure.host else LeastWork.of([(moved, 0)], "float32", limits)
    return [_row(figure, FORWARD, timing, work, "", "")]


def _rivals(figure: Figure, spec: Spec) -> list[Contender]:
    """Return who competes, whether or not they can run here."""
    known: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: spec.eager,
        "compile": lambda: torch.compile(spec.eager, dynamic=False),
        "cudnn": lambda: partial(_sdpa, "CUDNN_ATTENTION"),
        "flash": lambda: partial(_sdpa, "FLASH_ATTENTION"),
        "bare": lambda: _products_alone,
        "grouped_mm": lambda: _experts_by_grouped_mm,
    }
    chosen = [Contender(name, known[name]()) for name in figure.rivals if name in known]
    for name, peer in peers_of(spec.name).items():
        if name != "naive" and (name in figure.rivals or not figure.host):
            overwrites = getattr(peer, "overwrites", False)
            chosen.append(Contender(name, peer, overwrites=overwrites))
    return chosen


def _sdpa(
    backend: str, query: Any, key: Any, value: Any, is_causal: bool = False, **options: Any
) -> Any:
    """Run torch's attention on one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)


def _products_alone(x: Any, weight: Any, *others: Any, **options: Any) -> Any:
    """Run the products of a linear layer without anything behind them."""
    if others and isinstance(others[0], torch.Tensor) and others[0].dim() == 2:
        return F.linear(x, weight) + F.linear(x, others[0])
    return F.linear(x, weight, *others[:1])


def _experts_by_grouped_mm(
    x: Any, plan: Any, w1: Any, w2: Any, b1: None = None, b2: None = None, **options: Any
) -> Any:
    """Run the experts of a mixture (silu, gated) with torch's grouped products, as models do."""
    ids = plan.expert_ids.flatten()
    order = torch.argsort(ids, stable=True)
    ends = torch.bincount(ids, minlength=w1.shape[0]).cumsum(0).to(torch.int32)
    rows = order // plan.expert_ids.shape[1]
    gate, up = F.grouped_mm(x[rows], w1, offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, w2, offs=ends)
    weighted = y * plan.probs.to(x.dtype).flatten()[order, None]
    return torch.zeros_like(x).index_add(0, rows, weighted)


def _with_slopes(sample: Sample) -> Sample:
    """Return a call of attention with ALiBi slopes."""
    query = sample.args[0]
    heads = query.shape[1]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=query.device) / heads)
    return replace(sample, kwargs={**sample.kwargs, "alibi_slopes": slopes})


def _row(
    figure: Figure, direction: str, timing: Timing, work: LeastWork | None, backend: str, notes: str
) -> Row:
    """Return the row; the rival is the fastest of those that do all the work."""
    us = {name: timing.spread(name).median * 1e6 for name in timing.rounds}
    complete = [name for name in us if name not in (OURS, "bare")]
    rival = min(complete, key=us.__getitem__, default=None)
    seconds = us[OURS] * 1e-6
    of_limit = work.least_seconds / seconds if work else None
    of_mark = None
    if figure.mark is not None:
        against, factor = figure.mark
        if against == "limit":
            of_mark = of_limit / factor if of_limit is not None else None
        elif against in us:
            of_mark = timing.ratio(against, OURS).median / factor
    return {
        "op": figure.op,
        "direction": direction,
        "backend": backend,
        "ours_us": us[OURS],
        "rival": rival or "",
        "baseline_us": us[rival] if rival else None,
        "ratio": timing.ratio(rival, OURS).median if rival else None,
        "others_us": ", ".join(f"{name} {value:.1f}" for name, value in us.items() if name != OURS),
        "tflop_per_s": work.flops / seconds * 1e-12 if work and work.flops else None,
        "gb_per_s": work.bytes_moved / seconds * 1e-9 if work else None,
        "of_limit": of_limit,
        "mark": "" if figure.mark is None else f"{figure.mark[1]:g} of {figure.mark[0]}",
        "of_mark": of_mark,
        "notes": notes,
    }


if __name__ == "__main__":
    sys.exit(main())
