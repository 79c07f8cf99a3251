"""``fusedops profile``: where the time of a job's steps goes, and what makes it slow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.terminal import files

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.profiler import Finding, RunShape, Timings
    from fusedops.profiler.step_table import GroupTimes, RankTimes
    from fusedops.profiler.traces import TraceFile

# Ranks of a table, from which on only the slowest are shown.
_MOST_ROWS = 16
_KERNELS = 10
# Clocks that differ by fewer seconds are not mentioned.
_NOTABLE = 1e-3


@dataclass
class _Profile:
    """What a folder shows."""

    source: str
    shape: RunShape
    steps: int
    ranks: list[RankTimes]
    groups: list[GroupTimes] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    traces: list[TraceFile] = field(default_factory=list)
    offsets: dict[int, float] = field(default_factory=dict)  # of the traces' clocks
    memory: dict[str, Any] | None = None  # of one rank and step, by layer and kind


def profile(
    folder: Annotated[
        str, typer.Argument(help="A run of fusedops train, or a folder of torch.profiler's traces.")
    ],
    compare: Annotated[
        str, typer.Option(help="Another such folder: how many times longer this one takes.")
    ] = "",
    worst: Annotated[int, typer.Option(min=1, help="Slowest ranks to show.")] = 5,
    json_file: Annotated[
        str, typer.Option("--json", help="Write everything to a file; -: print it instead.")
    ] = "",
    trace_file: Annotated[
        str,
        typer.Option(
            "--trace",
            help="Write the slowest traces of a folder as one trace by one clock, for Perfetto "
            "(ui.perfetto.dev).",
        ),
    ] = "",
) -> None:
    """Print where the steps of each rank spend their time, and what a job could gain.

    docs/observe.md explains the columns.
    """
    from fusedops.terminal.console import console

    with files.one_line_errors():
        for file in (json_file, trace_file):
            if file not in ("", "-"):
                files.check_writable(file)
        profiled = _read(folder)
        if trace_file and not profiled.traces:
            raise files.UserError(
                f"--trace merges traces of torch.profiler, and {folder} has the records of a run"
            )
        record = _record(profiled)
        if json_file == "-":
            print(json.dumps(record, indent=1))
            return
        out = console()
        _show(profiled, worst, out)
        if compare:
            _compare(profiled, _read(compare), out)
        if json_file:
            files.write_json(Path(json_file), record)
        if trace_file:
            files.write_text(trace_file, json.dumps(_merged(profiled, worst)))
        for file in (json_file, trace_file):
            if file:
                out.print(f"wrote {file}", highlight=False, soft_wrap=True)


def _merged(profiled: _Profile, worst: int) -> dict[str, Any]:
    """Return a folder's traces as one: the slowest if there are many."""
    from fusedops.profiler.step_table import slowest
    from fusedops.profiler.traces import merged

    traces = profiled.traces
    if len(traces) > _MOST_ROWS:
        pairs = slowest(profiled.shape, profiled.ranks)[:worst]
        traces = [trace for trace in traces if trace.rank in {times.rank for times, _ in pairs}]
    return merged(traces, profiled.offsets)


def _read(folder: str) -> _Profile:
    """Return what a run's records show, or else the traces of a folder."""
    from fusedops.launch.config_table import InputError
    from fusedops.profiler.timings import FOLDER, HEADER
    from fusedops.terminal.progress import activity

    path = Path(folder)
    if not path.exists():
        raise files.UserError(
            f"{folder} does not exist: give a run of fusedops train, or a folder of traces"
        )
    recorded = (path / FOLDER / HEADER).exists() or (path / HEADER).exists()
    try:
        with activity(f"reading {folder}"):
            return _records(folder) if recorded else _traces(folder)
    except InputError as error:
        raise files.UserError(str(error)) from None


def _records(folder: str) -> _Profile:
    from fusedops.profiler import read_timings
    from fusedops.profiler.step_table import group_times, rank_times

    timings = read_timings(folder)
    if not timings.steps:
        notes = "".join(f" ({note})" for note in timings.notes)
        raise files.UserError(f"{folder} has no complete step yet{notes}: wait for its first step")
    return _Profile(
        folder,
        timings.shape,
        len(timings.steps),
        rank_times(timings),
        group_times(timings),
        find_all(timings),
        notes=timings.notes,
        memory=_memory(Path(folder)),
    )


def find_all(timings: Timings) -> list[Finding]:
    """Return what the recorded steps of a run show, in their order."""
    from fusedops.profiler import Detector

    detector = Detector(timings.shape)
    rows = zip(timings.steps, timings.values, strict=True)
    return [finding for step, values in rows for finding in detector.update(step, values)]


def _memory(run: Path) -> dict[str, Any] | None:
    """Return what the rank that allocates most did in the recorded step, if there is one."""
    from fusedops.profiler.timings import FOLDER

    records = []
    for path in (run / FOLDER).glob("memory-*.json"):
        with contextlib.suppress(OSError, ValueError):  # half a file of a killed process
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return max(records, key=lambda record: record["dynamic"], default=None)


def _traces(folder: str) -> _Profile:
    import os

    from fusedops.profiler import RunShape
    from fusedops.profiler.trace_links import clock_offsets, late_seconds, link_times, matched
    from fusedops.profiler.traces import read_traces

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
    return _Profile(
        folder,
        shape,
        0,
        ranks,
        link_times(together),
        kernels=kernels,
        notes=notes,
        traces=traces,
        offsets=offsets,
    )


def _show(profiled: _Profile, worst: int, out: Console) -> None:
    from fusedops.profiler.detection import listed
    from fusedops.profiler.step_table import slowest, what_if
    from fusedops.terminal.console import print_table

    sizes = ", ".join(f"{name} {n}" for name, n in profiled.shape.sizes.items() if n > 1)
    steps = f", {profiled.steps} steps" if profiled.steps else ""
    out.print(
        f"[bold]{profiled.source}[/]: {len(profiled.ranks)} ranks ({sizes}){steps}", highlight=False
    )
    shown = profiled.ranks
    factors = slowest(profiled.shape, profiled.ranks)
    if len(shown) > _MOST_ROWS:
        shown = [times for times, _ in factors[:worst]]
    print_table(out, _rank_table(shown, {times.rank: factor for times, factor in factors}))
    if profiled.groups:
        print_table(out, _group_table(profiled.groups, worst))
    if profiled.kernels:
        print_table(out, _kernel_table(profiled.kernels))
    if profiled.memory:
        print_table(out, _memory_table(profiled.memory))
    for item in what_if(profiled.shape, profiled.ranks, profiled.groups)[:worst]:
        out.print(
            f"if {item.name} {listed(item.ranks)} were as fast as the median: "
            f"{1e3 * item.seconds:.1f} ms a step, {1e3 * item.saved:.1f} ms less",
            highlight=False,
        )
    for finding in profiled.findings:
        style = "red" if finding.severe else "yellow"
        out.print(f"step {finding.step}: {finding}", style=style, highlight=False, markup=False)
    if profiled.steps and not profiled.findings:
        out.print("no rank, stage or link stands out", style="green", highlight=False)
    for note in profiled.notes:
        out.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def _rank_table(ranks: Sequence[RankTimes], factors: dict[int, float]) -> Any:
    from rich.table import Table

    from fusedops.terminal.console import number_columns

    table = Table(
        *number_columns("rank", "stage", "step", "computing", "communication"),
        *number_columns("not overlapped", "bubble", "preparing", "free", "by its peers"),
        header_style="bold",
        title="ms of a step",
    )
    for times in ranks:
        values = [times.step, times.computing, times.communication, times.not_overlapped]
        values += [times.bubble, times.preparing, times.free]
        milliseconds = (f"{1e3 * value:.1f}" for value in values)
        factor = f"{factors[times.rank]:.2f}x"
        table.add_row(str(times.rank), str(times.stage), *milliseconds, factor)
    return table


def _group_table(groups: Sequence[GroupTimes], worst: int) -> Any:
    from rich.table import Table

    from fusedops.profiler.detection import listed
    from fusedops.terminal.console import number_columns

    figures = number_columns("MB of a rank", "ms", "MB/s")
    table = Table("group", "ranks", *figures, header_style="bold", title="transfers of a step")
    for kind in dict.fromkeys(group.kind for group in groups):
        of_kind = sorted((g for g in groups if g.kind == kind), key=lambda group: -group.seconds)
        for group in of_kind[:worst]:
            table.add_row(
                kind,
                listed(group.ranks),
                f"{group.bytes / 1e6:.2f}",
                f"{1e3 * group.seconds:.2f}",
                f"{group.bandwidth / 1e6:,.0f}",
            )
    return table


def _kernel_table(kernels: dict[str, tuple[float, int]]) -> Any:
    from rich.table import Table

    from fusedops.terminal.console import number_columns

    figures = number_columns("ms", "share", "calls")
    table = Table("kernel", *figures, header_style="bold", title="all ranks and steps")
    total = sum(seconds for seconds, _ in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:_KERNELS]
    for name, (seconds, calls) in longest:
        share = f"{100 * seconds / total:.1f} %" if total else "-"
        table.add_row(name[:60], f"{1e3 * seconds:.1f}", share, str(calls))
    return table


def _memory_table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    from fusedops.terminal.console import number_columns

    layers: dict[str, dict[str, int]] = record["layers"]
    kinds = list(dict.fromkeys(kind for sizes in layers.values() for kind in sizes))
    title = f"MiB at the peak of step {record['step']}, rank {record['rank']}"
    table = Table("layer", *number_columns(*kinds), header_style="bold", title=title)
    for layer, sizes in layers.items():
        figures = (f"{sizes.get(kind, 0) / 2**20:.1f}" for kind in kinds)
        table.add_row(layer or "(outside)", *figures)
    return table


def _compare(first: _Profile, second: _Profile, out: Console) -> None:
    """Print how the mean step of two runs differs, column by column."""
    from rich.table import Table

    from fusedops.terminal.console import number_columns, print_table

    figures = number_columns(first.source, second.source, "difference", "factor")
    table = Table("mean of the ranks, ms", *figures, header_style="bold")
    for name in list(asdict(first.ranks[0]))[2:]:
        here, there = (
            1e3 * sum(getattr(times, name) for times in profiled.ranks) / len(profiled.ranks)
            for profiled in (first, second)
        )
        factor = f"{here / there:.2f}x" if there else "-"
        table.add_row(
            name.replace("_", " "), f"{here:.1f}", f"{there:.1f}", f"{here - there:+.1f}", factor
        )
    print_table(out, table)


def _record(profiled: _Profile) -> dict[str, Any]:
    from fusedops.profiler.step_table import what_if

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
