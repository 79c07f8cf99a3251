"""``fusedops plan``: which layouts of a model fit on given devices, without a GPU.

The estimates are those of ``fusedops.planner``; here are the command line, the table and the JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli import plan_image, plan_timed
from fusedops.cli.bench import options
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.models import TransformerConfig
    from fusedops.planner import Layout, LayoutRanking
    from fusedops.planner.search import PlannedLayout

_MOST_DEVICES = 1 << 16
# Columns of a terminal that shows every part.
_WIDE = 160


def plan(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A published model (--model list shows them), or a config.json; with --image: "
            "unet, or package:function of a module."
        ),
    ] = "",
    image: Annotated[
        str,
        typer.Option(
            help="With --device: cut a convolutional model of this input, as 1x4x30000x30000."
        ),
    ] = "",
    devices: Annotated[int, typer.Option(min=1, max=_MOST_DEVICES, help="Number of devices.")] = 8,
    memory: Annotated[
        str, typer.Option(help="Memory of each device: 32GiB, 80GB; default: --device's, or 80GiB.")
    ] = "",
    micro_batch: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sequences of a micro-batch on a data-parallel rank; 0: 1, or "
            "searched with --device.",
        ),
    ] = 0,
    microbatches: Annotated[
        int,
        typer.Option(
            min=1, help="Micro-batches of a step on each data-parallel rank, without --device."
        ),
    ] = 8,
    global_batch: Annotated[
        int, typer.Option(min=0, help="With --device: sequences of a step; 0: 8 per device.")
    ] = 0,
    seq_len: Annotated[
        int, typer.Option(min=0, help="Tokens of a sequence; 0: the model's longest.")
    ] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="float32, autocast, mixed, half-gradients, half: docs/estimates.md; default: "
            "mixed, with --image float32."
        ),
    ] = "",
    kernels: Annotated[
        str, typer.Option(help="fused (these ops), stock (eager torch) or eager (saves scores).")
    ] = "fused",
    tp: Annotated[str, typer.Option(help="Comma-separated sizes to try; default: 1,2,4,8.")] = "",
    pp: Annotated[str, typer.Option(help="The same; default: divisors of the layers.")] = "",
    ep: Annotated[str, typer.Option(help="The same; default: divisors of the experts.")] = "",
    cp: Annotated[
        int, typer.Option(min=0, help="Context-parallel ranks; 0: 1, or searched with --device.")
    ] = 0,
    schedule: Annotated[
        str, typer.Option(help="Comma-separated pipeline schedules: docs/pipeline.md.")
    ] = "1f1b,interleaved,zero_bubble,zbv",
    virtual: Annotated[
        int, typer.Option(min=0, help="Stages of a pipeline rank; 0: the schedule's default.")
    ] = 0,
    zero: Annotated[str, typer.Option(help="Comma-separated ZeRO stages to try.")] = "0,1,2,3",
    recompute: Annotated[
        str, typer.Option(help="Comma-separated: none, selective, full; or scores+norm+activation.")
    ] = "none,selective,full",
    offload: Annotated[
        str, typer.Option(help="Comma-separated: none, optimizer, optimizer+activations.")
    ] = "none,optimizer,optimizer+activations",
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="linear_cross_entropy: logits in chunks.")
    ] = False,
    expert_imbalance: Annotated[
        float,
        typer.Option(min=1, help="Rows of the busiest expert-parallel rank, by their mean."),
    ] = 1.0,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows to show that fit, and closest misses.")
    ] = 12,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Compare with small models trained here (two minutes)."),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="Sort by seconds on a known device (h100, a100-80), or on a TOML file of one."
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="With --device: time and bytes of the first row.")
    ] = False,
    diff: Annotated[
        str, typer.Option(help="With --device: compare two rows of the table, as 1,2.")
    ] = "",
    tokens: Annotated[
        float, typer.Option(min=0, help="With --device: tokens of a training, for its days.")
    ] = 0.0,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="With --device: fewer and more devices, too.")
    ] = False,
    svg_file: Annotated[
        str, typer.Option("--svg", help="With --device: draw time and memory of the rows.")
    ] = "",
    json_file: Annotated[
        str, typer.Option("--json", help="Write all rows to a file; -: print them instead.")
    ] = "",
) -> None:
    """Print which layouts of a model fit on the devices, and the memory of each part.

    The command exits with 1 if nothing fits. The formulas, and how far measured peaks are from
    them, are in docs/estimates.md.
    """
    with files.one_line_errors():
        if model == "list":
            _show_models()
            return
        if measure:
            _measure()
            return
        if not model:
            raise files.UserError("--model is missing: a name (--model list) or a config.json")
        for file in (json_file, svg_file):
            if file not in ("", "-"):
                files.check_writable(file)
        if image:
            fits = plan_image.run(
                ctx,
                model=model,
                image=image,
                devices=devices,
                device=device,
                memory=_memory(memory) if memory else None,
                precision=precision or "float32",
                rows=rows,
                json_file=json_file,
            )
            if not fits:
                raise typer.Exit(1)
            return
        choices = _choices(tp, pp, ep, zero, recompute, offload, schedule)
        base: dict[str, Any] = {"seq_len": seq_len or None, "precision": precision or "mixed"}
        base |= {"kernels": kernels, "chunked_loss": chunked_loss}
        base["expert_imbalance"] = expert_imbalance
        if device:
            choices["cp"], choices["micro_batch"] = _given(cp), _given(micro_batch)
            choices["virtual"] = _given(virtual)
            request = plan_timed.PlanRequest(
                name=model,
                model=_model(model),
                devices=devices,
                device=device,
                global_batch=global_batch or 8 * devices,
                memory=_memory(memory) if memory else None,
                base=_layout(base),
                choices={name: values for name, values in choices.items() if values},
                rows=rows,
            )
            fits = plan_timed.run(
                request,
                explain=explain,
                diff=diff,
                tokens=tokens,
                scaling=scaling,
                json_file=json_file,
                svg_file=svg_file,
            )
        else:
            if explain or diff or tokens or scaling or global_batch or svg_file:
                raise files.UserError(
                    "--explain, --diff, --tokens, --scaling, --svg and --global-batch need --device"
                )
            choices["virtual"] = virtual or None
            base |= {"micro_batch": micro_batch or 1, "microbatches": microbatches, "cp": cp or 1}
            sizes = _model(model)
            result = _plan(sizes, devices, _memory(memory or "80GiB"), choices, _layout(base))
            _deliver(model, sizes, devices, result, rows, json_file)
            fits = result.fitting > 0
    if not fits:
        raise typer.Exit(1)


def _given(value: int) -> tuple[int, ...]:
    return (value,) if value else ()


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


def _model(name: str) -> TransformerConfig:
    """Return the sizes of a known model, or of a configuration file."""
    from fusedops.models import from_config, preset

    file = _configuration(name)
    try:
        return preset(name) if file is None else from_config(file, sizes_only=True)
    except (ValueError, TypeError) as error:
        where = f"{file}: " if file is not None and str(file) not in str(error) else ""
        raise files.UserError(f"{where}{error}") from None


def _memory(text: str) -> int:
    from fusedops.planner import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise files.UserError(str(error)) from None


def _layout(base: dict[str, Any]) -> Layout:
    """Return what is not searched for."""
    from fusedops.planner import Layout
    from fusedops.planner.layout import KERNELS, PRECISIONS

    options.check_known(base["precision"], PRECISIONS, "precision")
    options.check_known(base["kernels"], KERNELS, "kernels")
    try:
        return Layout.of(**base)
    except (ValueError, TypeError) as error:
        raise files.UserError(str(error)) from None


def _plan(
    model: TransformerConfig, devices: int, memory: int, choices: dict[str, Any], base: Layout
) -> LayoutRanking:
    """Return every layout; whatever is wrong is the user's."""
    from fusedops.planner import plan as search
    from fusedops.terminal.progress import activity

    try:
        with activity(f"searching layouts of {devices} devices"):
            return search(model, devices, memory, base, **choices)
    except (ValueError, TypeError) as error:
        raise files.UserError(str(error)) from None


def _configuration(name: str) -> Path | None:
    """Return the file that ``--model`` names, or ``None`` for the name of a published model."""
    path = Path(name)
    if name.endswith(".json"):
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.is_dir():
        raise files.UserError(
            f"--model: the folder {name} has no config.json: give a folder with one"
        )
    if path.is_file():
        raise files.UserError(f"--model: {name} is no configuration: its name must end in .json")
    return None


def _choices(
    tp: str, pp: str, ep: str, zero: str, recompute: str, offload: str, schedule: str
) -> dict[str, Any]:
    """Return what is to be tried, by the names that ``layouts`` takes."""
    from fusedops.parallel.pipeline.schedules import SCHEDULES
    from fusedops.planner.layout import OFFLOADS, RECOMPUTE

    choices: dict[str, Any] = {
        "tp": _numbers(tp, "tp"),
        "pp": _numbers(pp, "pp"),
        "ep": _numbers(ep, "ep"),
        "zero": _numbers(zero or ",", "zero", least=0, most=3),
    }
    words = options.split(recompute)
    choices["recompute"] = list(dict.fromkeys(words))
    if not words:
        raise files.UserError(f"--recompute is empty; known: {', '.join(RECOMPUTE)}")
    for word in "+".join(choices["recompute"]).split("+"):
        options.check_known(word, RECOMPUTE, "recompute")
    offloads = []
    for text in offload.split(","):
        words = options.split(text, "+")
        for word in words:
            options.check_known(word, ("none", *OFFLOADS), "offload")
        offloads.append(tuple(dict.fromkeys(word for word in words if word != "none")))
    choices["offload"] = list(dict.fromkeys(offloads))
    choices["schedule"] = tuple(dict.fromkeys(options.words(schedule, SCHEDULES, "schedule")))
    return choices


def _numbers(text: str, name: str, least: int = 1, most: int = _MOST_DEVICES) -> tuple[int, ...]:
    words = options.split(text)
    if text and not words:
        raise files.UserError(f"--{name} is empty: write sizes such as 1,2, or leave it out")
    for word in words:
        if not word.isdecimal() or len(word) > 9 or not least <= int(word) <= most:
            expected = f"numbers from {least} to {most}"
            raise files.UserError(f"--{name} must be {expected} with commas between, got {word!r}")
    return tuple(dict.fromkeys(int(word) for word in words))


def _measure() -> None:
    """Measure small models, and print the table of docs/estimates.md."""
    options.check_transformers()
    from fusedops.cli.plan_measure import cases, measure
    from fusedops.terminal.console import console
    from fusedops.terminal.progress import steps

    work = list(cases())
    rows = []
    with steps(len(work)) as progress:
        for case in work:
            progress.describe(" ".join(str(word) for word in case))
            rows.append(measure(*case))
            progress.advance()
    lines = [
        "| model | width x layers, tokens, words | dtype | recompute | kernels | measured MiB "
        "| estimate | without weights and states |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        hidden, layers, batch, seq_len, vocabulary = row.size
        lines.append(
            f"| {row.family} | {hidden} x {layers}, {batch} x {seq_len}, {vocabulary} "
            f"| {row.dtype} | {row.recompute} | {row.kernels} | {row.peak / 2**20:.1f} "
            f"| {row.error:+.1%} | {row.error_of_temporary:+.1%} |"
        )
    worst = max(abs(row.error) for row in rows)
    lines += ["", f"The largest difference of a peak is {worst:.1%}."]
    out = console()
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True, markup=False)


def _show_models() -> None:
    from rich.table import Table

    from fusedops.planner import PRESETS, show_count
    from fusedops.terminal.console import console, number_columns, print_table

    sizes = number_columns("parameters", "layers", "hidden", "heads", "experts", "tokens")
    table = Table("model", *sizes, header_style="bold")
    for name, model in PRESETS.items():
        table.add_row(
            name,
            show_count(model.parameters().total),
            str(model.num_layers),
            str(model.hidden_size),
            str(model.num_heads),
            str(model.num_experts or "-"),
            str(model.seq_len),
        )
    print_table(console(), table)


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
