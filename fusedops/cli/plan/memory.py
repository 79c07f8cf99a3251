"""``fusedops plan``: which layouts of a model fit on given devices, without a GPU.

The estimates are those of ``fusedops.planner``; here are the command line, the table and the JSON.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli import output
from fusedops.cli.plan import arguments
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, show_table
from fusedops.terminal.progress import activity
from fusedops.terminal.sizes import show_bytes, show_count

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.models import TransformerConfig
    from fusedops.planner import LayoutRanking
    from fusedops.planner.search import PlannedLayout

# Columns of a terminal that shows every part.
_WIDE = 160


@arguments.takes_search_options
def memory(
    given: arguments.SearchOptions,
    micro_batch: Annotated[
        int, typer.Option(min=1, help="Sequences of a micro-batch on a data-parallel rank.")
    ] = 1,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a step on each data-parallel rank.")
    ] = 8,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows that fit, and half as many others.")] = 12,
) -> None:
    """Print which layouts of a model fit on the devices, and the memory of each part.

    The command exits with 1 if nothing fits. The formulas, and how far measured peaks are from
    them, are in docs/estimates.md.
    """
    with files.one_line_errors():
        output.check_outputs(given.json_file)
        sizes, choices = given.sizes(), given.choices()
        base = given.base(micro_batch=micro_batch, microbatches=microbatches, cp=cp)
        default = "" if given.device else "80GiB"
        capacity = arguments.device_memory(given.device, given.memory or default)
        from fusedops.planner import plan as search

        searching = f"searching layouts of {given.devices} devices"
        with activity(searching), files.user_errors(ValueError, TypeError):
            virtual = given.virtual or None
            result = search(sizes, given.devices, capacity, base, virtual=virtual, **choices)
        show = partial(_show, given.model, sizes, given.devices, result, rows)
        record = _record(given.model, sizes, given.devices, result)
        output.deliver(record, given.json_file, show)
    if not result.fitting:
        raise typer.Exit(1)


def _show(
    name: str, model: TransformerConfig, devices: int, plan: LayoutRanking, rows: int, out: Console
) -> None:
    """Print the model, the table (what fits, then the nearest of what does not) and the advice."""
    from fusedops.planner.search import CRITERION

    fits, first = plan.fitting, plan.rows[0].layout
    training = first.training
    out.print(
        f"[bold]{name}[/]: {show_count(model.parameters().total)} parameters, "
        f"{first.length(model)} tokens x {training.micro_batch} x {first.parallel.microbatches} "
        f"micro-batches, {training.precision}, {training.kernels} kernels, "
        f"{devices} x {show_bytes(plan.memory)}",
    )
    shown = [*plan.rows[: min(fits, rows)], *plan.rows[fits : fits + rows // 2 + 1]]
    narrow = out.width < _WIDE
    columns = (
        *number_columns("dp", "tp", "pp", "ep", "zero"),
        *("bubble", "recompute", "offload"),
        *number_columns("peak", "left", "host", *_parts(shown[0], narrow=narrow)),
    )
    cells = (_cells(row, plan.memory, narrow=narrow) for row in shown)
    show_table(out, columns, cells, padding=(0, 0) if narrow else (0, 1))
    out.print(
        f"{fits} of {len(plan.rows)} layouts fit; in GiB of the fullest device, bubbles in %; "
        f"sorted: {CRITERION}",
        style="dim",
    )
    for note in plan.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    out.print(plan.advice, style="green" if fits else "yellow")


def _cells(row: PlannedLayout, memory: int, *, narrow: bool) -> list[Any]:
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


def _record(
    name: str, model: TransformerConfig, devices: int, plan: LayoutRanking
) -> dict[str, Any]:
    """Return everything as JSON has it; bytes are whole numbers."""
    from fusedops.models.config import describe

    return {
        "model": name,
        "sizes": describe(model),
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
