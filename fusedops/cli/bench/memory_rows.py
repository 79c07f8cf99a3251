"""What ``fusedops bench memory`` and ``fusedops bench arena`` measure and show."""

from __future__ import annotations

import itertools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fusedops.bench import machine
from fusedops.bench import memory as bench
from fusedops.bench.memory import ArenaStepRow, MemoryRow
from fusedops.bench.model_zoo import FAMILIES, ModelSize
from fusedops.bench.results import dtype_name
from fusedops.bench.runner import Conditions
from fusedops.bench.svg import rectangles
from fusedops.bench.tables import load_rows
from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.memory.arena import place
from fusedops.memory.measurement.report import MemoryReport
from fusedops.runtime.timer import TimingPlan
from fusedops.terminal import files, memory_plot
from fusedops.terminal.console import DISTURBED, number_columns, show_table
from fusedops.terminal.progress import sigterm_interrupts, steps


def measure_policies(
    family: str,
    size: ModelSize,
    conditions: Conditions,
    json_file: Path | None,
    svg_file: Path | None,
) -> list[MemoryRow]:
    """Measure families under memory policies, show the rows and write the files."""
    chosen = [FAMILIES[name] for name in options.words(family, FAMILIES, "family")]
    cases = list(itertools.product(chosen, conditions.set_up()))
    where, seconds = conditions.device, conditions.seconds
    plan = TimingPlan(seconds=seconds)
    rows: list[MemoryRow] = []
    reports: dict[str, MemoryReport] = {}
    with steps(len(cases)) as progress, sigterm_interrupts():
        for of, weights in cases:
            report = progress.reporter(f"{of.name} {dtype_name(weights)}")
            measured, drawn = bench.run_case(of, size, weights, where, plan, report)
            rows += measured
            reports = reports or drawn
            progress.advance()
    settings = {"allocator": conditions.allocator, "seconds": seconds, "device": where.type}
    record = {"settings": settings, "rows": [asdict(row) for row in rows]}
    record = machine.provenance(where) | record
    picture = output.text_file(svg_file, partial(_picture_of_steps, reports))
    output.deliver(record, json_file, partial(_show_policies, rows, record), picture)
    return rows


def _show_policies(rows: list[MemoryRow], record: dict[str, Any], out: Console) -> None:
    here, settings = record["machine"], record["settings"]
    figures = ("activations MiB", "peak MiB", "ms", "x plain", "quartiles", "bits")
    show_table(
        out,
        ("model", "size", "dtype", "policy", *number_columns(*figures)),
        map(_policy_cells, rows),
        title=f"a step of training under memory policies ({here['name']}, "
        f"{here['threads']} threads, allocator {settings['allocator']})",
        title_justify="left",
    )
    notes = [
        "activations: what the forward leaves for the backward; peak: of the step above weights; "
        "x plain: time by the plain step's, median of the rounds"
    ]
    if settings["device"] == "cpu":
        notes.append("offload on a CPU moves bytes out of torch's allocator, to the same memory")
    for note in notes:
        out.print(note, style="dim")


def _policy_cells(row: MemoryRow) -> list[str]:
    times = [DISTURBED, "-", "-"]
    if row.trusted:
        quartiles = f"{row.overhead_q1:.2f}-{row.overhead_q3:.2f}"
        times = [f"{row.median_ms:.1f}", f"{row.overhead:.2f}", quartiles]
    sizes = [f"{size / 2**20:.1f}" for size in (row.activations, row.peak)]
    bits = "same" if row.same_bits else "OTHER"
    return [row.family, row.case, row.dtype, row.policy, *sizes, *times, bits]


def _picture_of_steps(reports: dict[str, MemoryReport]) -> str:
    first = next(iter(reports.values()))
    lines = {name: reports[name].timeline for name in ("plain", "recompute")}
    title = f"{first.model}: bytes of one step, without and with recomputation"
    return memory_plot.timeline(title, lines)


@dataclass(frozen=True)
class _Result:
    """What one of the two modes gives."""

    record: dict[str, Any]
    show: Callable[[Console], None]
    title: str  # of the picture
    boxes: Sequence[tuple[int, int, int, int]]  # begin, end, first and last offset
    same_bits: bool = True

    def picture(self) -> str:
        """Return the SVG of the buffers."""
        return rectangles(self.title, self.boxes)


def steps_of(
    family: str, size: ModelSize, conditions: Conditions, processes: int, *, patched: bool
) -> _Result:
    """Time a step with and without an arena."""
    options.words(family, FAMILIES, "family")
    dtype, *others = conditions.set_up()
    if others:
        raise files.UserError(f"--step needs one dtype, got {','.join(conditions.dtypes)}")
    given = (dtype, conditions.seconds, conditions.threads, processes, patched)
    with sigterm_interrupts():
        rows = bench.arena_steps(bench.ArenaStepSettings(family, size, *given))
    speedup, report = statistics.median(row.speedup for row in rows), rows[0].report
    settings: dict[str, Any] = {"family": family, "dtype": conditions.dtypes[0]}
    settings |= {"size": size.label, "patched": patched}
    record = {"settings": settings, "rows": [asdict(row) for row in rows], "speedup": speedup}
    return _Result(
        machine.provenance(conditions.device) | record,
        partial(_show_steps, rows, speedup),
        f"{family} {size.label}: {report.block_bytes} bytes, bound {report.bound_bytes}",
        report.boxes,
        all(row.same_bits for row in rows),
    )


def _show_steps(rows: Sequence[ArenaStepRow], speedup: float, out: Console) -> None:
    names = ("plain ms", "arena ms", "plain / arena", "quartiles", "block / bound", "bits")
    columns = ("process", *number_columns(*names))
    show_table(out, columns, ((number, *_step_cells(row)) for number, row in enumerate(rows, 1)))
    out.print(f"median of {len(rows)} processes: {speedup:.2f}")
    out.print(str(rows[0].report), style="dim")


def _step_cells(row: ArenaStepRow) -> list[str]:
    times = [DISTURBED, "-", "-", "-"]
    if row.trusted:
        times = [f"{row.plain_ms:.1f}", f"{row.arena_ms:.1f}", f"{row.speedup:.2f}"]
        times.append(f"{row.speedup_q1:.2f}-{row.speedup_q3:.2f}")
    share = row.report.block_bytes / max(row.report.bound_bytes, 1)
    return [*times, f"{share:.4f}", "same" if row.same_bits else "OTHER"]


def placements(
    sources: Sequence[Path], capacity: int | None, alignment: int, seconds: float
) -> _Result:
    """Place the buffers of each file."""
    records: list[dict[str, Any]] = []
    boxes: list[tuple[int, int, int, int]] = []
    with steps(len(sources)) as progress, sigterm_interrupts():
        for source in sources:
            progress.describe(source.name)
            lower, upper, size = _read(source)
            began = time.perf_counter()
            limits: dict[str, Any] = {"capacity": capacity, "alignment": alignment}
            try:
                placed = place(lower, upper, size, seconds=seconds, **limits)
            except ValueError as error:
                raise files.UserError(f"{source}: {error}") from None
            record = {
                "file": source.name,
                "buffers": len(placed.offsets),
                "bound": placed.bound,
                "block": placed.height,
                "fits": placed.fits,
                "exact": placed.exact,
                "seconds": time.perf_counter() - began,
                "offsets": list(placed.offsets),
            }
            records.append(record)
            ends = map(operator.add, placed.offsets, size)
            boxes = boxes or list(zip(lower, upper, placed.offsets, ends, strict=True))
            progress.advance()
    first = records[0]
    title = f"{first['file']}: {first['block']} bytes, bound {first['bound']}"
    return _Result({"rows": records}, partial(_show, records, capacity), title, boxes)


def _read(source: Path) -> list[list[int]]:
    columns: dict[str, list[int]] = {name: [] for name in ("lower", "upper", "size")}
    for number, row in enumerate(load_rows(source), 2):
        for name, column in columns.items():
            text = row.get(name)
            try:
                column.append(int(text or ""))
            except ValueError:
                raise files.UserError(
                    f"{source}, line {number}: {name} must be an integer, got {text!r}; the first "
                    "line must be id,lower,upper,size"
                ) from None
    return list(columns.values())


def _show(records: list[dict[str, Any]], capacity: int | None, out: Console) -> None:
    cells = []
    for record in records:
        words = "the smallest possible" if record["exact"] else "fits" if capacity else ""
        words = words if record["fits"] else "larger than the capacity"
        sizes = [record[name] for name in ("buffers", "bound", "block")]
        share = record["block"] / record["bound"] if record["bound"] else 1.0
        cells.append((record["file"], *sizes, f"{share:.4f}", f"{record['seconds']:.2f}", words))
    figures = number_columns("buffers", "bound", "block", "block / bound", "seconds")
    show_table(out, ("file", *figures, ""), cells)
