"""What ``fusedops profile`` and ``report`` show: tables of a run's steps, and one HTML file.

The file has curves, the timeline of all ranks, memory, communication and findings. It opens without
a network: the plotting library (plotly.js) is part of it.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fusedops.launch.config_table import InputError
from fusedops.profiler import Detector, Finding, RunShape, Timings, read_timings
from fusedops.profiler.detection import listed
from fusedops.profiler.step_table import (
    GroupTimes,
    RankTimes,
    group_times,
    rank_times,
    slowest,
    what_if,
)
from fusedops.profiler.timings import FOLDER, GROUPS, HEADER, REGULAR, SECTIONS
from fusedops.profiler.trace_links import clock_offsets, late_seconds, link_times, matched
from fusedops.profiler.traces import TraceFile, merged, read_traces
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity

# Ranks of a table, from which on only the slowest are shown.
_MOST_ROWS = 16
_KERNELS = 10
# Clocks that differ by fewer seconds are not mentioned.
_NOTABLE = 1e-3


@dataclass
class Profile:
    """What a folder shows."""

    source: str
    shape: RunShape
    steps: int
    ranks: list[RankTimes]
    groups: list[GroupTimes]
    notes: list[str]
    findings: list[Finding] = field(default_factory=list)
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)
    traces: list[TraceFile] = field(default_factory=list)
    offsets: dict[int, float] = field(default_factory=dict)  # of the traces' clocks
    memory: dict[str, Any] | None = None  # of one rank and step, by layer and kind


def trace_text(profiled: Profile, worst: int) -> str:
    """Return a folder's traces as the JSON of one: the slowest if there are many."""
    traces = profiled.traces
    if len(traces) > _MOST_ROWS:
        pairs = slowest(profiled.shape, profiled.ranks)[:worst]
        traces = [trace for trace in traces if trace.rank in {times.rank for times, _ in pairs}]
    return json.dumps(merged(traces, profiled.offsets))


def read(folder: str) -> Profile:
    """Return what a run's records show, or else the traces of a folder."""
    path = Path(folder)
    if not path.exists():
        raise files.UserError(
            f"{folder} does not exist: give a run of fusedops train, or a folder of traces"
        )
    recorded = (path / FOLDER / HEADER).exists() or (path / HEADER).exists()
    with activity(f"reading {folder}"):
        return _records(folder) if recorded else _traces(folder)


def _records(folder: str) -> Profile:
    timings = read_timings(folder)
    if not timings.steps:
        notes = "".join(f" ({note})" for note in timings.notes)
        raise files.UserError(f"{folder} has no complete step yet{notes}: wait for its first step")
    return Profile(
        folder,
        timings.shape,
        len(timings.steps),
        rank_times(timings),
        group_times(timings),
        timings.notes,
        findings=find_all(timings),
        memory=max(memory_records(Path(folder)), key=lambda found: found["dynamic"], default=None),
    )


def find_all(timings: Timings) -> list[Finding]:
    """Return what the recorded steps of a run show, in their order."""
    detector = Detector(timings.shape)
    rows = zip(timings.steps, timings.values, strict=True)
    return [finding for step, values in rows for finding in detector.update(step, values)]


def memory_records(run: Path) -> list[dict[str, Any]]:
    """Return what the ranks of a run allocated in the recorded step, in their order."""
    records = []
    for path in (run / FOLDER).glob("memory-*.json"):
        with contextlib.suppress(OSError, ValueError):  # half a file of a killed process
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(records, key=lambda record: record["rank"])


def _traces(folder: str) -> Profile:
    traces = read_traces(folder, processes=os.cpu_count() or 1)
    kernels: dict[str, tuple[float, int]] = {}
    for trace in traces:
        for name, (seconds, calls) in trace.kernels.items():
            before = kernels.get(name, (0.0, 0))
            kernels[name] = before[0] + seconds, before[1] + calls
    ranks = [trace.times for trace in traces if trace.times is not None]
    notes = [trace.note for trace in traces if trace.note]
    present = {times.rank for times in ranks}
    missing = sorted(set(range(max(present) + 1)) - present)
    if missing:
        notes.append(f"no trace of ranks {', '.join(map(str, missing[:10]))}")
    together = matched({trace.rank: trace.collectives for trace in traces})
    offsets = clock_offsets(together)
    far = {rank: offset for rank, offset in offsets.items() if abs(offset) >= _NOTABLE}
    if far:
        rank = max(far, key=lambda rank: abs(far[rank]))
        word = "ahead of" if far[rank] > 0 else "behind"
        notes.append(
            f"the clocks of {len(far)} of {len(offsets)} ranks differ from rank {min(offsets)}'s, "
            f"that of rank {rank} most: {abs(far[rank]):.3f} s {word} it; they were aligned by "
            "collectives"
        )
    late = late_seconds(together, offsets)
    if late:
        rank = max(late, key=late.__getitem__)
        notes.append(
            f"others wait for rank {rank} the longest in collectives: {1e3 * late[rank]:.1f} ms "
            "a step"
        )
    shape = RunShape({"pp": 1, "dp": len(ranks), "cp": 1, "tp": 1, "ep": 1})
    groups = link_times(together)
    further: dict[str, Any] = {"kernels": kernels, "traces": traces, "offsets": offsets}
    return Profile(folder, shape, 0, ranks, groups, notes, **further)


def show(profiled: Profile, worst: int, out: Console) -> None:
    """Print the tables, findings and notes of a folder."""
    sizes = ", ".join(f"{name} {n}" for name, n in profiled.shape.sizes.items() if n > 1)
    steps = f", {profiled.steps} steps" if profiled.steps else ""
    out.print(f"[bold]{profiled.source}[/]: {len(profiled.ranks)} ranks ({sizes}){steps}")
    shown = profiled.ranks
    factors = slowest(profiled.shape, profiled.ranks)
    if len(shown) > _MOST_ROWS:
        shown = [times for times, _ in factors[:worst]]
    _show_ranks(shown, {times.rank: factor for times, factor in factors}, out)
    if profiled.groups:
        _show_groups(profiled.groups, worst, out)
    if profiled.kernels:
        _show_kernels(profiled.kernels, out)
    if profiled.memory:
        _show_memory(profiled.memory, out)
    for item in what_if(profiled.shape, profiled.ranks, profiled.groups)[:worst]:
        out.print(
            f"if {item.name} {listed(item.ranks)} were as fast as the median: "
            f"{1e3 * item.seconds:.1f} ms a step, {1e3 * item.saved:.1f} ms less"
        )
    for finding in profiled.findings:
        style = "red" if finding.severe else "yellow"
        out.print(f"step {finding.step}: {finding}", style=style, markup=False)
    if profiled.steps and not profiled.findings:
        out.print("no rank, stage or link stands out", style="green")
    for note in profiled.notes:
        out.print(f"note: {note}", style="yellow", markup=False)


def _show_ranks(ranks: Sequence[RankTimes], factors: dict[int, float], out: Console) -> None:
    sections = ["step", "computing", "communication", "not_overlapped", "bubble", "preparing"]
    sections.append("free")
    cells = []
    for times in ranks:
        figures = (f"{1e3 * getattr(times, name):.1f}" for name in sections)
        cells.append((times.rank, times.stage, *figures, f"{factors[times.rank]:.2f}x"))
    names = (name.replace("_", " ") for name in sections)
    columns = number_columns("rank", "stage", *names, "by its peers")
    show_table(out, columns, cells, title="ms of a step")


def _show_groups(groups: Sequence[GroupTimes], worst: int, out: Console) -> None:
    cells = []
    for kind in dict.fromkeys(group.kind for group in groups):
        of_kind = sorted((g for g in groups if g.kind == kind), key=lambda group: -group.seconds)
        for group in of_kind[:worst]:
            figures = f"{group.bytes / 1e6:.2f}", f"{1e3 * group.seconds:.2f}"
            cells.append((kind, listed(group.ranks), *figures, f"{group.bandwidth / 1e6:,.0f}"))
    columns = ("group", "ranks", *number_columns("MB of a rank", "ms", "MB/s"))
    show_table(out, columns, cells, title="transfers of a step")


def _show_kernels(kernels: dict[str, tuple[float, int]], out: Console) -> None:
    total = sum(seconds for seconds, _ in kernels.values())
    cells = []
    for name, (seconds, calls) in sorted(kernels.items(), key=lambda item: -item[1][0]):
        share = f"{100 * seconds / total:.1f} %" if total else "-"
        cells.append((name[:60], f"{1e3 * seconds:.1f}", share, calls))
    columns = ("kernel", *number_columns("ms", "share", "calls"))
    show_table(out, columns, cells[:_KERNELS], title="all ranks and steps")


def _show_memory(record: dict[str, Any], out: Console) -> None:
    layers: dict[str, dict[str, int]] = record["layers"]
    kinds = list(dict.fromkeys(kind for sizes in layers.values() for kind in sizes))
    cells = (
        (layer or "(outside)", *(f"{sizes.get(kind, 0) / 2**20:.1f}" for kind in kinds))
        for layer, sizes in layers.items()
    )
    title = f"MiB at the peak of step {record['step']}, rank {record['rank']}"
    show_table(out, ("layer", *number_columns(*kinds)), cells, title=title)


def compare(first: Profile, second: Profile, out: Console) -> None:
    """Print how the mean step of two runs differs, column by column."""
    cells = []
    for name in list(asdict(first.ranks[0]))[2:]:
        here, there = (
            1e3 * sum(getattr(times, name) for times in profiled.ranks) / len(profiled.ranks)
            for profiled in (first, second)
        )
        figures = f"{here:.1f}", f"{there:.1f}", f"{here - there:+.1f}"
        factor = f"{here / there:.2f}x" if there else "-"
        cells.append((name.replace("_", " "), *figures, factor))
    columns = number_columns(first.source, second.source, "difference", "factor")
    show_table(out, ("mean of the ranks, ms", *columns), cells)


def record(profiled: Profile) -> dict[str, Any]:
    """Return what is shown as JSON has it."""
    return {
        "source": profiled.source,
        "sizes": profiled.shape.sizes,
        "steps": profiled.steps,
        "ranks": [asdict(times) for times in profiled.ranks],
        "groups": [asdict(group) | {"bandwidth": group.bandwidth} for group in profiled.groups],
        "findings": [finding.record() for finding in profiled.findings],
        "what_if": [
            asdict(item) for item in what_if(profiled.shape, profiled.ranks, profiled.groups)
        ],
        "kernels": {name: list(value) for name, value in profiled.kernels.items()},
        "memory": profiled.memory,
        "notes": profiled.notes,
    }


METRICS = "metrics.jsonl"
_CURVES = (
    *("loss", "validation_loss", "tokens_per_second", "mfu", "lr", "grad_norm", "memory_bytes"),
    "communication",
)
_MOST = 65535  # of 16 bits, in which the numbers of steps and ranks are packed
# Of what a step allocates, by ``fusedops.memory.StepMemory``.
MEMORY_KINDS = ("activation", "gradient", "cast", "temporary")
# Parts of the planner's estimate by the kind of process group.
_COMMUNICATION = {"tensor": "tp", "context": "cp", "experts": "ep", "pipeline": "pp", "data": "dp"}
_TEMPLATE = Path(__file__).with_name("report.html")


def page(run: str | Path, plan: dict[str, Any] | None = None) -> str:
    """Return the HTML of a run's folder; the first layout of a plan is shown next to it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("fusedops report needs plotly: pip install plotly") from None
    folder = Path(run)
    # "</" would end the script.
    values = {
        "title": html.escape(f"Run {folder.resolve().name}"),
        "data": json.dumps(page_data(folder, plan), allow_nan=False).replace("</", "<\\/"),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def page_data(folder: Path, plan: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the page of a run shows; arguments as of ``page``."""
    lines = _metrics(folder / METRICS)
    recorded = (folder / FOLDER / HEADER).exists()
    timings = read_timings(folder) if recorded else None
    if timings is not None and not timings.steps:
        timings = None
    groups = group_times(timings) if timings else []
    return {
        "overview": _overview(lines, timings),
        "metrics": _curves(lines),
        "plan": _plan(lines, plan, groups) if plan else None,
        "timings": _packed(timings) if timings else None,
        "memory": _step_memory(folder),
        "ranks": _ranks(timings) if timings else [],
        "groups": _groups(groups),
        "matrix": _matrix(groups, timings.shape.ranks) if timings else None,
        "findings": [finding.record() for finding in find_all(timings)] if timings else [],
    }


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics; half a line at the end is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        is_profile = (path.parent / "profile").is_dir()
        action = (
            f"for the times of another trainer: fusedops profile {path.parent}"
            if is_profile
            else "give the folder that `out` names"
        )
        raise InputError(f"no run of fusedops train: {path}: {error.strerror}; {action}") from None
    lines = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            lines.append(record)
    if not lines:
        raise InputError(f"{path} has no step yet: wait for the first one")
    return lines


def _curves(lines: list[dict[str, Any]]) -> dict[str, Any]:
    curves = {}
    for name in _CURVES:
        points = [(line["step"], line[name]) for line in lines if _is_number(line.get(name))]
        if points:
            steps, values = zip(*points, strict=True)
            curves[name] = {"steps": list(steps), "values": list(values)}
    return curves


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _overview(lines: list[dict[str, Any]], timings: Timings | None) -> list[list[str]]:
    last = lines[-1]
    rows = [["steps", str(last["step"])], ["loss", _number(last.get("loss"))]]
    for line in [line for line in lines if "validation_loss" in line][-1:]:
        rows.append(["validation loss", f"{_number(line['validation_loss'])} at {line['step']}"])
    rows.append(["tokens per second, median", _number(_median(lines, "tokens_per_second"))])
    rows.append(["MFU, median", f"{100 * (_median(lines, 'mfu') or 0.0):.2f} %"])
    rows.append(["seconds per step, median", _number(_median(lines, "seconds"))])
    if timings is not None:
        sizes = ", ".join(f"{name} {n}" for name, n in timings.shape.sizes.items() if n > 1)
        rows.append(["ranks", f"{timings.shape.ranks}" + (f" ({sizes})" if sizes else "")])
        rows += [["note", note] for note in timings.notes]
    return rows


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [float(line[name]) for line in lines if _is_number(line.get(name))]
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else None


def _number(value: Any) -> str:
    return f"{value:.6g}" if _is_number(value) else "-"


def _plan(
    lines: list[dict[str, Any]], plan: dict[str, Any], groups: list[GroupTimes]
) -> list[list[str]]:
    """Return the prediction of a plan's first layout with the medians of the run.

    Its communication is that which computing does not hide; measured is what the last rank to
    arrive at the collectives of a group waits, so that no slow rank is part of it.
    """
    row = (plan.get("layouts") or [{}])[0]
    measured = {
        "seconds": ("seconds per step", _median(lines, "seconds")),
        "tokens_per_second": ("tokens per second", _median(lines, "tokens_per_second")),
        "utilization": ("MFU", _median(lines, "mfu")),
        "peak": ("peak bytes of a rank", _median(lines, "memory_bytes")),
    }
    pairs = [(title, row.get(name), value) for name, (title, value) in measured.items()]
    if isinstance(row.get("parts"), dict):
        for part, kind in _COMMUNICATION.items():
            seconds = [group.seconds for group in groups if group.kind == kind]
            if seconds:
                title = f"seconds of communication per step: {kind}"
                pairs.append((title, row["parts"].get(part), sum(seconds) / len(seconds)))
    return [
        [title, _number(predicted), _number(value), f"{100 * (predicted / value - 1):+.1f} %"]
        for title, predicted, value in pairs
        if _is_number(predicted) and value
    ]


def _packed(timings: Timings) -> dict[str, Any]:
    """Return the times and bytes of all steps and ranks as shares of their maximum, in 16 bits."""
    fields = {}
    for name in (*SECTIONS, *(f"blocked_{group}" for group in GROUPS)):
        values = timings.of(name).double().clamp(min=0)
        most = float(values.max())
        shares = (values / most * _MOST).round() if most else values
        words = shares.to(torch.int32).numpy().astype("<u2").tobytes()
        fields[name] = {"most": most, "text": base64.b64encode(words).decode()}
    return {
        "steps": timings.steps,
        "ranks": timings.shape.ranks,
        "fields": fields,
        "own": list(REGULAR),
        "irregular": [name for name in SECTIONS if name not in REGULAR],
        "blocked": [f"blocked_{group}" for group in GROUPS],
    }


def _step_memory(folder: Path) -> dict[str, Any] | None:
    """Return what ranks allocated in the recorded step, by layer and kind, in MiB."""
    records = memory_records(folder)
    if not records:
        return None
    ranks = [
        {
            "rank": record["rank"],
            "step": record["step"],
            "layers": [name or "(outside)" for name in record["layers"]],
            "values": [
                [kinds.get(kind, 0) / 2**20 for kind in MEMORY_KINDS]
                for kinds in record["layers"].values()
            ],
            "timeline": [
                [nbytes / 2**20, layer or "(outside)", phase]
                for nbytes, layer, phase in record["timeline"]
            ],
            "static": {name: record[name] / 2**20 for name in ("weights", "gradients", "states")},
        }
        for record in records
    ]
    return {"kinds": list(MEMORY_KINDS), "ranks": ranks}


def _ranks(timings: Timings) -> list[list[str]]:
    rows = []
    for times, factor in slowest(timings.shape, rank_times(timings)):
        figures = [f"{1e3 * value:.2f}" for value in (times.step, times.own, times.not_overlapped)]
        rows.append([str(times.rank), str(times.stage), *figures, f"{factor:.2f}x"])
    return rows


def _groups(groups: list[GroupTimes]) -> list[list[str]]:
    rows = []
    for group in groups:
        figures = f"{group.bytes / 1e6:.3f}", f"{1e3 * group.seconds:.3f}"
        rows.append([group.kind, listed(group.ranks), *figures, f"{group.bandwidth / 1e6:.1f}"])
    return rows


def _matrix(groups: list[GroupTimes], ranks: int) -> dict[str, Any]:
    """Return the bandwidths of each rank's groups, MB/s; ``None`` where it has no such group."""
    kinds = list(dict.fromkeys(group.kind for group in groups))
    values: list[list[float | None]] = [[None] * len(kinds) for _ in range(ranks)]
    for group in groups:
        for rank in group.ranks:
            values[rank][kinds.index(group.kind)] = group.bandwidth / 1e6
    return {"kinds": kinds, "ranks": list(range(ranks)), "values": values}
