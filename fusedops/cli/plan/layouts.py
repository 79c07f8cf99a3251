"""Tables, JSON and picture of ``fusedops plan`` and ``plan time``, of ``fusedops.planner``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fusedops.cli.plan.arguments import SearchOptions
from fusedops.models import TransformerConfig
from fusedops.models.config import describe as sizes_of
from fusedops.parallel.pipeline.schedules import table
from fusedops.parallel.pipeline.timeline import timeline
from fusedops.planner import Device, Layout, LayoutRanking, TimedLayout, TimedRanking, fastest
from fusedops.planner.search import CRITERION, PlannedLayout, describe
from fusedops.planner.step_time import utilization
from fusedops.terminal import files, svg
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity
from fusedops.terminal.sizes import show_bytes, show_count

# Columns of a terminal that shows every part of the memory.
_WIDE = 160
# Numbers of devices of a scaling curve, as factors.
_SCALES = (0.25, 0.5, 1, 2, 4)
# Parts of a step by what they are, in the order of the tables and of the bars.
_KINDS = {
    "compute": ("products", "attention", "elementwise", "head"),
    "recomputation": ("recomputation",),
    "idle device": ("layers", "host", "step"),
    "exposed communication": ("tensor", "context", "experts", "pipeline", "data", "offload"),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
}
# From the colour-blind safe palette of Okabe and Ito, in an order of its own.
_COLOURS = ("#0072B2", "#56B4E9", "#999999", "#D55E00", "#F0E442", "#009E73", "#CC79A7")
_WIDTH, _LEFT, _RIGHT, _BAR, _STEP, _TOP = 1000, 380, 80, 16, 22, 40


def show_memory(
    name: str, model: TransformerConfig, devices: int, plan: LayoutRanking, rows: int, out: Console
) -> None:
    """Print the model, the table (what fits, then the nearest of what does not) and the advice."""
    fits, first = plan.fitting, plan.rows[0].layout
    training = first.training
    out.print(
        f"[bold]{name}[/]: {show_count(model.parameters().total)} parameters, "
        f"{first.length(model)} tokens x {training.micro_batch} x {first.parallel.microbatches} "
        f"micro-batches, {training.precision}, {training.kernels} kernels, "
        f"{devices} x {show_bytes(plan.memory)}"
    )
    shown = [*plan.rows[: min(fits, rows)], *plan.rows[fits : fits + rows // 2 + 1]]
    narrow = out.width < _WIDE
    columns = (
        *number_columns("dp", "tp", "pp", "ep", "zero"),
        *("bubble", "recompute", "offload"),
        *number_columns("peak", "left", "host", *_parts(shown[0], narrow=narrow)),
    )
    cells = (_memory_cells(row, plan.memory, narrow=narrow) for row in shown)
    show_table(out, columns, cells, padding=(0, 0) if narrow else (0, 1))
    out.print(
        f"{fits} of {len(plan.rows)} layouts fit; in GiB of the fullest device, bubbles in %; "
        f"sorted: {CRITERION}",
        style="dim",
    )
    for note in plan.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    out.print(plan.advice, style="green" if fits else "yellow")


def _memory_cells(row: PlannedLayout, memory: int, *, narrow: bool) -> list[Any]:
    config, left = row.layout.parallel, row.left(memory)
    offload = "".join(word[0] for word in config.offload) if narrow else "+".join(config.offload)
    # The share of a step that a pipeline loses, and its schedule.
    bubble = f"{100 * row.layout.bubble:.0f} {config.pipeline_schedule}" if config.pp > 1 else "-"
    return [
        *(config.dp, config.tp, config.pp, config.ep, config.zero),
        bubble,
        row.layout.recompute.replace("none", "-"),
        offload or "-",
        _gib(row.estimate.peak),
        f"[{'green' if left >= 0 else 'red'}]{_gib(left)}[/]",
        _gib(row.estimate.host) if row.estimate.host else "-",
        *(_gib(part) for part in _parts(row, narrow=narrow).values()),
    ]


def _parts(row: PlannedLayout, *, narrow: bool) -> dict[str, int]:
    """Return the parts of the peak; in a narrow terminal, what is static and the rest."""
    parts = row.estimate.parts
    if not narrow:
        return parts
    static = sum(parts[name] for name in ("weights", "gradients", "states"))
    return {"static": static, "rest": row.estimate.peak - static}


def _gib(size: int) -> str:
    value = size / 2**30
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def memory_record(
    name: str, model: TransformerConfig, devices: int, plan: LayoutRanking
) -> dict[str, Any]:
    """Return the rows of ``fusedops plan`` as JSON has them; bytes are whole numbers."""
    return {
        "model": name,
        "sizes": sizes_of(model),
        "parameters": model.parameters().total,
        "devices": devices,
        "memory": plan.memory,
        "advice": plan.advice,
        "notes": plan.notes,
        "fitting": plan.fitting,
        "layouts": [
            {
                "fits": row.left(plan.memory) >= 0,
                "layout": row.layout.options(),
                "bubble": row.layout.bubble,
                "bytes": row.estimate.parts,
                "peak": row.estimate.peak,
                "moment": row.estimate.moment,
                "stage": row.estimate.stage,
                "host": row.estimate.host,
            }
            for row in plan.rows
        ],
    }


@dataclass(frozen=True)
class PlanRequest:
    """What is planned."""

    options: SearchOptions
    model: TransformerConfig
    device: Device
    global_batch: int
    memory: int
    base: Layout
    choices: dict[str, Any]

    def plan(self, devices: int, batch: int, keep: int) -> TimedRanking:
        """Return the ``keep`` fastest layouts of so many devices, and sequences of a step."""
        limits: dict[str, Any] = {"memory": self.memory, "base": self.base, "keep": keep}
        searching = f"searching layouts of {devices} devices"
        with activity(searching), files.user_errors(ValueError, TypeError):
            return fastest(self.model, devices, self.device, batch, **limits, **self.choices)


def show(request: PlanRequest, plan: TimedRanking, out: Console) -> None:
    """Print the model, the table and what was looked at."""
    given = request.options
    out.print(
        f"[bold]{given.model}[/]: {show_count(request.model.parameters().total)} parameters, "
        f"global batch {request.global_batch} x {request.base.length(request.model)} tokens, "
        f"{given.devices} x {plan.device.name} ({show_bytes(plan.memory)} for a step)"
    )
    if plan.rows:
        sizes = number_columns(*("", "dp", "tp", "pp", "cp", "ep", "zero", "micro-batch"))
        times = number_columns("s", "tokens/s/device", "MFU", "GiB")
        cells = (
            (number, *_cells(row, plan.device, given.devices))
            for number, row in enumerate(plan.rows, 1)
        )
        show_table(out, (*sizes, "schedule", "recompute", "offload", *times), cells)
    out.print(_summary(plan), style="dim")


def _cells(row: TimedLayout, device: Device, devices: int) -> list[Any]:
    config = row.layout.parallel
    stages = f" x{config.virtual}" if config.virtual > 1 else ""
    return [
        *(config.dp, config.tp, config.pp, config.cp, config.ep, config.zero),
        f"{row.layout.training.micro_batch} x {config.microbatches}",
        f"{config.pipeline_schedule}{stages}" if config.pp > 1 else "-",
        _recomputation(row.layout),
        "+".join(config.offload) or "-",
        f"{row.seconds:.3f}",
        f"{_tokens(row) / row.seconds / devices:,.0f}",
        f"{100 * utilization(row.shape, device, row.seconds):.1f} %",
        f"{row.estimate.peak / 2**30:.1f}",
    ]


def diff(plan: TimedRanking, text: str, out: Console) -> None:
    """Print two rows of a plan and their differences; ``text`` has their numbers: ``1,2``."""
    rows = {str(number): row for number, row in enumerate(plan.rows, 1)}
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2 or not rows.keys() >= set(words):
        raise files.UserError(
            f"--diff must be two rows of the table, from 1 to {len(rows)}, as 1,2: {text}"
        )
    first, second = (rows[word] for word in words)
    for word in words:
        out.print(f"{word}: {named(rows[word])}")
    quantities = (
        ("time, ms", first.time.parts, second.time.parts, 1e3),
        ("GiB", first.estimate.parts, second.estimate.parts, 2**-30),
    )
    for title, one, two, scale in quantities:
        names = [name for name in one if one[name] or two.get(name)]
        pairs = {name: (scale * one[name], scale * two.get(name, 0)) for name in names}
        pairs["all"] = scale * sum(one.values()), scale * sum(two.values())
        cells = (
            (name, *(f"{value:.2f}" for value in (value, other, other - value)))
            for name, (value, other) in pairs.items()
        )
        show_table(out, (title, *number_columns(*words, "difference")), cells)


def named(row: TimedLayout) -> str:
    """Return a layout in a line, with its micro-batches."""
    config = row.layout.parallel
    sequences = f"{row.layout.training.micro_batch} x {config.microbatches}"
    stages = f", {config.virtual} stages per rank" if config.virtual > 1 else ""
    return f"{describe(row.layout)}, micro-batch {sequences}{stages}"


def _recomputation(layout: Layout) -> str:
    """Return what is recomputed, and of how many layers of a stage if not of all."""
    count = layout.parallel.recompute_layers
    return layout.recompute.replace("none", "-") + ("" if count is None else f" ({count})")


def _tokens(row: TimedLayout) -> float:
    """Return the tokens of a step, of all devices together."""
    shape = row.shape
    return shape.dp * shape.micro_batch * shape.microbatches * shape.seq_len


def _summary(plan: TimedRanking) -> str:
    """Return how many layouts were looked at and dropped, and why."""
    text = f"{plan.choices} choices of sizes, schedule and micro-batch; {plan.examined} examined"
    if plan.choices > plan.examined:
        text += ", no other is faster than the last row even without recomputation"
    lines = [text]
    if plan.too_large:
        lines.append(f"{plan.too_large} do not fit, whatever is recomputed or offloaded")
    if plan.least is not None and not plan.rows:
        least, layout = plan.least.estimate.peak, describe(plan.least.layout)
        lines.append(
            f"the least is {show_bytes(least)} with {layout}: take more devices, or larger ones"
        )
    reasons = sorted(plan.refused.items(), key=lambda item: -item[1])
    return "\n".join([*lines, *(f"{count} cannot run: {why}" for why, count in reasons[:5])])


def explain(plan: TimedRanking, out: Console) -> None:
    """Print where the time and the bytes of the first row go."""
    row = plan.rows[0]
    out.print(f"1: {named(row)}")
    times = []
    for kind, names in _KINDS.items():
        parts = {name: row.time.parts[name] for name in names if row.time.parts[name] > 0}
        seconds = sum(parts.values())
        detail = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in parts.items())
        if seconds:
            share = f"{100 * seconds / row.seconds:.1f} %"
            times.append((kind, f"{1e3 * seconds:.1f}", share, detail if len(parts) > 1 else ""))
    times.append(("step", f"{1e3 * row.seconds:.1f}", "100.0 %", ""))
    times.append(("hidden communication", f"{1e3 * row.time.hidden:.1f}", "", "not in the step"))
    show_table(out, ("time", *number_columns("ms", "share"), "of which"), times)
    peak = row.estimate.peak
    sizes = [
        (part, f"{size / 2**30:.2f}", f"{100 * size / peak:.1f} %")
        for part, size in row.estimate.parts.items()
        if size
    ]
    sizes.append(("left", f"{(plan.memory - peak) / 2**30:.2f}", ""))
    show_table(out, ("bytes at the peak", *number_columns("GiB", "share")), sizes)


def budget(row: TimedLayout, devices: int, tokens: float, out: Console) -> None:
    """Print how long a training of so many tokens takes."""
    seconds = tokens / _tokens(row) * row.seconds
    days, hours = seconds / 86400, seconds / 3600 * devices
    out.print(
        f"{tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} device-hours, without restarts, "
        "evaluation and checkpoints"
    )


def scaling(request: PlanRequest, out: Console) -> None:
    """Print the fastest layout on fewer and on more devices.

    Strong scaling keeps the global batch, weak scaling the sequences of a device.
    """
    columns = (*number_columns("devices", "global batch", "s", "tokens/s", "efficiency"), "layout")
    for title, weak in (("strong scaling: the same global batch", False), ("weak scaling", True)):
        cells: list[tuple[Any, ...]] = []
        first = 0.0
        for scale in _SCALES:
            count = round(request.options.devices * scale)
            batch = round(request.global_batch * (scale if weak else 1))
            if count < 1 or batch < 1:
                continue
            rows = request.plan(count, batch, 1).rows
            if not rows:
                cells.append((count, batch, "-", "-", "-", "nothing fits"))
                continue
            rate = _tokens(rows[0]) / rows[0].seconds
            first = first or rate / count
            share = f"{100 * rate / count / first:.0f} %"
            figures = f"{rows[0].seconds:.3f}", f"{rate:,.0f}", share
            cells.append((count, batch, *figures, named(rows[0])))
        show_table(out, columns, cells, title=title)


def _options(layout: Layout, model: TransformerConfig) -> dict[str, Any]:
    """Return the fields of a layout, with the stages that it was planned for."""
    options = layout.options()
    if layout.parallel.pp > 1:
        options["pipeline_cuts"] = [run.start for run in layout.runs(model)[1:]]
    return options


def record(request: PlanRequest, plan: TimedRanking) -> dict[str, Any]:
    """Return the rows of ``fusedops plan time`` as JSON has them."""
    return {
        "model": request.options.model,
        "sizes": sizes_of(request.model),
        "devices": request.options.devices,
        "device": plan.device.name,
        "memory": plan.memory,
        "global_batch": request.global_batch,
        "choices": plan.choices,
        "examined": plan.examined,
        "refused": plan.refused,
        "too_large": plan.too_large,
        "layouts": [
            {
                "layout": _options(row.layout, request.model),
                "seconds": row.seconds,
                "parts": row.time.parts,
                "hidden": row.time.hidden,
                "tokens_per_second": _tokens(row) / row.seconds,
                "utilization": utilization(row.shape, plan.device, row.seconds),
                "bytes": row.estimate.parts,
                "peak": row.estimate.peak,
            }
            for row in plan.rows
        ],
    }


def picture(plan: TimedRanking, lines: Sequence[str]) -> str:
    """Return the SVG of at least one row: time and memory, part by part, and the first pipeline.

    ``lines`` has one for each row.
    """
    rows = plan.rows
    times = [
        {kind: sum(row.time.parts[name] for name in names) for kind, names in _KINDS.items()}
        for row in rows
    ]
    sizes = [
        {name: size / 2**30 for name, size in row.estimate.parts.items() if size} for row in rows
    ]
    height, panels = 0, []
    for title, values, unit, limit in (
        ("seconds of a step", times, "s", None),
        ("memory of the fullest device", sizes, "GiB", plan.memory / 2**30),
    ):
        bars = "\n".join(_bars(title, lines, values, unit, limit))
        panels.append(svg.element("g", bars, transform=f"translate(0 {height})"))
        height += _TOP + _STEP * len(rows) + 24
    pipeline = _pipeline(rows[0])
    if pipeline:
        panels.append(svg.element("g", pipeline, transform=f"translate(0 {height})"))
        height += 52 + 30 * rows[0].layout.parallel.pp
    return svg.document(_WIDTH, height, "layouts by time and memory", panels, heading=False)


def _bars(
    title: str,
    lines: Sequence[str],
    values: Sequence[Mapping[str, float]],
    unit: str,
    limit: float | None,
) -> Iterator[str]:
    """Yield a bar for each row, of one segment for each part."""
    names = list(dict.fromkeys(name for parts in values for name, part in parts.items() if part))
    longest = max(limit or 0.0, *(sum(parts.values()) for parts in values))
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    yield svg.text(8, 16, title, font_size=14)
    x = _LEFT
    for name, colour in zip(names, _COLOURS, strict=False):
        yield from svg.legend(x, 22, name, colour)
        x += 24 + round(6.2 * len(name))
    for index, (label, parts) in enumerate(zip(lines, values, strict=True)):
        y = _TOP + _STEP * index
        short = label if len(label) < 64 else f"{label[:62]}.."
        yield svg.text(8, y + 12, f"{index + 1}: {short}", font_size=11)
        at = float(_LEFT)
        for name, colour in zip(names, _COLOURS, strict=False):
            width = parts.get(name, 0.0) * scale
            if width:
                tip = svg.element("title", svg.quoted(f"{name} {parts[name]:.3g} {unit}"))
                yield svg.element("rect", tip, x=at, y=y, width=width, height=_BAR, fill=colour)
            at += width
        yield svg.text(at + 5, y + 12, f"{sum(parts.values()):.3g} {unit}")
    if limit is not None:
        x = round(_LEFT + limit * scale)
        bottom = _TOP + _STEP * len(values)
        yield svg.element("line", x1=x, y1=_TOP - 4, x2=x, y2=bottom, stroke="#222")


def _pipeline(row: TimedLayout) -> str:
    """Return the timeline of a layout's pipeline as SVG; empty without one."""
    config = row.layout.parallel
    if config.pp == 1:
        return ""
    # More micro-batches repeat the same steady state.
    shown = min(config.microbatches, 4 * config.pp)
    shown -= shown % config.pp if config.microbatches % config.pp == 0 else 0
    line = timeline(table(config.pipeline_schedule, config.pp, shown, config.virtual))
    return line.svg().replace("<svg ", f'<svg width="{_WIDTH}" height="{52 + 30 * config.pp}" ', 1)
