"""The command lines of ``fusedops plan``; what they estimate with and show is imported late."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fusedops.cli import output
from fusedops.cli.bench.options import DefaultGroup
from fusedops.cli.plan import arguments
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table
from fusedops.terminal.progress import activity
from fusedops.terminal.sizes import show_count

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    cls=DefaultGroup,
    add_completion=False,
    help="Estimate memory and time of parallel layouts, without a GPU.",
)


@app.command(
    epilog="Also `fusedops plan time` (the fastest layouts on a known device), "
    "`fusedops plan image` (cuts of a convolutional model), `fusedops plan models` (known models)."
)
@arguments.takes_search_options
def memory(
    given: arguments.SearchOptions,
    micro_batch: Annotated[int, Option(min=1, help="Sequences of a micro-batch on a rank.")] = 1,
    microbatches: Annotated[int, Option(min=1, help="Micro-batches of a step on a rank.")] = 8,
    cp: Annotated[int, Option(min=1, help="Context-parallel ranks.")] = 1,
    rows: Annotated[int, Option(min=1, help="Rows that fit, and half as many others.")] = 12,
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
        from fusedops.cli.plan import layouts
        from fusedops.planner import plan

        searching = f"searching layouts of {given.devices} devices"
        with activity(searching), files.user_errors(ValueError, TypeError):
            virtual = given.virtual or None
            result = plan(sizes, given.devices, capacity, base, virtual=virtual, **choices)
        show = partial(layouts.show_memory, given.model, sizes, given.devices, result, rows)
        record = layouts.memory_record(given.model, sizes, given.devices, result)
        output.deliver(record, given.json_file, show)
    if not result.fitting:
        raise typer.Exit(1)


@app.command("time")
@arguments.takes_search_options
def step_time(
    given: arguments.SearchOptions,
    global_batch: Annotated[int, Option(min=0, help="Sequences of a step; 0: 8 a device.")] = 0,
    micro_batch: Annotated[int, Option(min=0, help="Sequences of a micro-batch; 0: any.")] = 0,
    cp: Annotated[int, Option(min=0, help="Context-parallel ranks; 0: any.")] = 0,
    rows: Annotated[int, Option(min=1, help="Rows to show.")] = 12,
    explain: Annotated[bool, Option("--explain", help="Explain the first row.")] = False,
    diff: Annotated[str, Option(help="Compare two rows of the table, as 1,2.")] = "",
    tokens: Annotated[float, Option(min=0, help="Tokens of a training, for its days.")] = 0.0,
    scaling: Annotated[bool, Option("--scaling", help="Also plan fewer and more devices.")] = False,
    svg_file: Annotated[str, Option("--svg", help="Draw time and memory of the rows.")] = "",
) -> None:
    """Print the fastest layouts that fit on a known device, and where their time goes.

    The command exits with 1 if nothing fits. The formulas, and how far measured steps are from
    them, are in docs/estimates.md and docs/planning.md.
    """
    with files.one_line_errors():
        output.check_outputs(given.json_file, svg_file)
        device = arguments.known_device(given.device)
        sizes, choices = given.sizes(), given.choices()
        for name, size in (("cp", cp), ("micro_batch", micro_batch), ("virtual", given.virtual)):
            choices[name] = (size,) if size else ()
        choices = {name: values for name, values in choices.items() if values}
        memory = arguments.device_memory(given.device, given.memory)
        batch = global_batch or 8 * given.devices
        from fusedops.cli.plan import layouts

        request = layouts.PlanRequest(given, sizes, device, batch, memory, given.base(), choices)
        plan = request.plan(given.devices, batch, rows)

        def show(out: Console) -> None:
            layouts.show(request, plan, out)
            if plan.rows and explain:
                layouts.explain(plan, out)
            if plan.rows and diff:
                layouts.diff(plan, diff, out)
            if plan.rows and tokens:
                layouts.budget(plan.rows[0], given.devices, tokens, out)
            if scaling:
                layouts.scaling(request, out)

        named = [layouts.named(row) for row in plan.rows]
        drawn = output.text_file(svg_file if named else "", lambda: layouts.picture(plan, named))
        output.deliver(layouts.record(request, plan), given.json_file, show, drawn)
    if not plan.rows:
        raise typer.Exit(1)


@app.command()
def image(
    model: Annotated[str, Option(help="unet, or package:function of a module.")] = "unet",
    shape: Annotated[str, Option(help="Input shape: 1x4x30000x30000.")] = "",
    devices: arguments.Devices = 8,
    device: arguments.Device = "",
    memory: arguments.DeviceMemory = "",
    precision: Annotated[str, Option(help="float32 or half.")] = "float32",
    rows: Annotated[int, Option(min=1, help="Rows to show.")] = 12,
    json_file: arguments.JsonFile = "",
) -> None:
    """Print the cuts of a convolutional model's input over the devices, fastest first.

    The command exits with 1 if no cut fits. The bytes and times are explained in docs/spatial.md.
    """
    with files.one_line_errors():
        output.check_outputs(json_file)
        where = arguments.known_device(device)
        from fusedops.cli.plan import images

        sizes, capacity = images.read_shape(shape), arguments.device_memory(device, memory)
        plans, refused = images.plans_of(model, sizes, devices, where, precision)
        plans.sort(key=lambda plan: (plan.memory > capacity, plan.seconds))
        record = {
            "model": model,
            "image": sizes,
            "devices": devices,
            "memory": capacity,
            "fitting": sum(plan.memory <= capacity for plan in plans),
            "refused": refused,
            "cuts": [images.cut_record(plan, capacity) for plan in plans],
        }
        output.deliver(record, json_file, partial(images.show, record, plans, where.name, rows))
    if not record["fitting"]:
        raise typer.Exit(1)


@app.command()
def models() -> None:
    """List the published models that --model knows, and their sizes."""
    from fusedops.planner import PRESETS

    sizes = number_columns("parameters", "layers", "hidden", "heads", "experts", "tokens")
    cells = []
    for name, model in PRESETS.items():
        shape = model.num_layers, model.hidden_size, model.num_heads, model.num_experts or "-"
        cells.append((name, show_count(model.parameters().total), *shape, model.seq_len))
    show_table(console(), ("model", *sizes), cells)
