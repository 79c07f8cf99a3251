"""``fusedops plan``: which layouts of a model fit on given devices, without a GPU.

The estimates are those of ``fusedops.planner``; here are the command line, the table and the JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.plan import arguments
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.models import TransformerConfig
    from fusedops.planner import Layout, LayoutRanking
    from fusedops.planner.search import PlannedLayout

# Columns of a terminal that shows every part.
_WIDE = 160


def memory(
    model: arguments.Model = "",
    devices: arguments.Devices = 8,
    device: arguments.Device = "",
    memory: arguments.DeviceMemory = "",
    micro_batch: Annotated[
        int, typer.Option(min=1, help="Sequences of a micro-batch on a data-parallel rank.")
    ] = 1,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a step on each data-parallel rank.")
    ] = 8,
    seq_len: arguments.SequenceLength = 0,
    precision: arguments.Precision = "mixed",
    kernels: arguments.Kernels = "fused",
    tp: arguments.TensorParallel = "",
    pp: arguments.Pipeline = "",
    ep: arguments.Experts = "",
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    schedule: arguments.Schedule = arguments.SCHEDULES,
    virtual: arguments.Virtual = 0,
    zero: arguments.Zero = "0,1,2,3",
    recompute: arguments.Recompute = arguments.RECOMPUTE,
    offload: arguments.Offload = arguments.OFFLOAD,
    chunked_loss: arguments.ChunkedLoss = False,
    expert_imbalance: arguments.ExpertImbalance = 1.0,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows to show that fit, and closest misses.")
    ] = 12,
    json_file: arguments.JsonFile = "",
) -> None:
    """Print which layouts of a model fit on the devices, and the memory of each part.

    The command exits with 1 if nothing fits. The formulas, and how far measured peaks are from
    them, are in docs/estimates.md.
    """
    with files.one_line_errors():
        arguments.check_files(json_file)
        sizes = arguments.model_sizes(model)
        choices = arguments.choices(tp, pp, ep, zero, recompute, offload, schedule)
        choices["virtual"] = virtual or None
        base = arguments.base_layout(
            seq_len=seq_len or None,
            precision=precision,
            kernels=kernels,
            chunked_loss=chunked_loss,
            expert_imbalance=expert_imbalance,
            micro_batch=micro_batch,
            microbatches=microbatches,
            cp=cp,
        )
        capacity = arguments.device_memory(device, memory or ("" if device else "80GiB"))
        result = _plan(sizes, devices, capacity, choices, base)
        _deliver(model, sizes, devices, result, rows, json_file)
    if not result.fitting:
        raise typer.Exit(1)


def _deliver(
    name: str,
    model: TransformerConfig,
    devices: int,
    result: LayoutRanking,
    rows: int,
    json_file: str,
) -> None:
    """Print the plan, as JSON or as a table, and write the file that was asked for."""
    from fusedops.terminal.console import console

    record = _record(name, model, devices, result)
    if json_file == "-":
        print(json.dumps(record, indent=1))
        return
    out = console()
    _show(name, model, devices, result, rows, out)
    if json_file:
        files.write_json(Path(json_file), record)
        out.print(f"wrote {json_file}", highlight=False, soft_wrap=True)


def _plan(
    model: TransformerConfig, devices: int, memory: int, choices: dict[str, Any], base: Layout
) -> LayoutRanking:
    """Return every layout.

    Raises:
        UserError: an argument is wrong.
    """
    from fusedops.planner import plan as search
    from fusedops.terminal.progress import activity

    try:
        with activity(f"searching layouts of {devices} devices"):
            return search(model, devices, memory, base, **choices)
    except (ValueError, TypeError) as error:
        raise files.UserError(str(error)) from None


def _show(
    name: str, model: TransformerConfig, devices: int, plan: LayoutRanking, rows: int, out: Any
) -> None:
    """Print the model, the table (what fits, then the nearest of what does not) and the advice."""
    from fusedops.planner import show_bytes, show_count
    from fusedops.planner.search import CRITERION
    from fusedops.terminal.console import print_table

    fits, first = plan.fitting, plan.rows[0].layout
    training = first.training
    out.print(
        f"[bold]{name}[/]: {show_count(model.parameters().total)} parameters, "
        f"{first.length(model)} tokens x {training.micro_batch} x {first.parallel.microbatches} "
        f"micro-batches, {training.precision}, {training.kernels} kernels, "
        f"{devices} x {show_bytes(plan.memory)}",
        highlight=False,
    )
    shown = [*plan.rows[: min(fits, rows)], *plan.rows[fits : fits + rows // 2 + 1]]
    print_table(out, _table(shown, plan.memory, narrow=out.width < _WIDE))
    out.print(
        f"{fits} of {len(plan.rows)} layouts fit; in GiB of the fullest device, bubbles in %; "
        f"sorted: {CRITERION}",
        style="dim",
        highlight=False,
    )
    for note in plan.notes:
        out.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    out.print(plan.advice, style="green" if fits else "yellow", highlight=False)


def _table(shown: list[PlannedLayout], memory: int, *, narrow: bool) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", padding=(0, 0) if narrow else (0, 1))
    sizes = ("dp", "tp", "pp", "ep", "zero")
    for column in (*sizes, "bubble", "recompute", "offload"):
        table.add_column(column, justify="right" if column in sizes else "left")
    for column in ("peak", "left", "host", *_parts(shown[0], narrow=narrow)):
        table.add_column(column, justify="right")
    for row in shown:
        left = row.left(memory)
        style = "green" if left >= 0 else "red"
        config = row.layout.parallel
        offload = "+".join(config.offload) or "-"
        table.add_row(
            *(str(getattr(config, size)) for size in sizes),
            _bubble(row.layout),
            row.layout.recompute.replace("none", "-"),
            "".join(word[0] for word in config.offload) or "-" if narrow else offload,
            _gib(row.estimate.peak),
            f"[{style}]{_gib(left)}[/]",
            _gib(row.estimate.host) if row.estimate.host else "-",
            *(_gib(part) for part in _parts(row, narrow=narrow).values()),
        )
    return table


def _bubble(layout: Layout) -> str:
    """Return the share of a step that a pipeline loses, and its schedule."""
    if layout.parallel.pp == 1:
        return "-"
    return f"{100 * layout.bubble:.0f} {layout.parallel.pipeline_schedule}"


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
        "layouts": [_row_record(row, plan.memory) for row in plan.rows],
    }


def _row_record(row: PlannedLayout, memory: int) -> dict[str, Any]:
    layout = row.layout
    return {
        "fits": row.left(memory) >= 0,
        "layout": layout.options(),
        "bubble": layout.bubble,
        "bytes": row.estimate.parts,
        "peak": row.estimate.peak,
        "moment": row.estimate.moment,
        "stage": row.estimate.stage,
        "host": row.estimate.host,
    }
