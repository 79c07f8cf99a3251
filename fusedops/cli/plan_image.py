"""``fusedops plan --image``: cuts of a convolutional model over devices, sorted by seconds."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.planner import Device, SpatialPlan

OPTIONS = ("model", "image", "devices", "device", "memory", "precision", "rows", "json_file")
PRECISIONS = {"float32": "float32", "half": "bfloat16"}


def run(
    ctx: typer.Context,
    *,
    model: str,
    image: str,
    devices: int,
    device: str,
    memory: int | None,
    precision: str,
    rows: int,
    json_file: str,
) -> bool:
    """Print the cuts of an image over the devices; returns whether one fits.

    Args:
        ctx: of the command, for the options that an image does not have.
        model: ``unet``, or the importable ``package:function`` of a module.
        image: the shape of the input, ``1x4x30000x30000``.
        devices: their number.
        device: a known one, or a TOML file.
        memory: bytes of each device; by default what ``device`` has for tensors.
        precision: of ``PRECISIONS``.
        rows: of the table.
        json_file: a file that gets all rows; ``"-"``: standard output, alone; empty: none.
    """
    from fusedops.cli.device_file import load

    _check_options(ctx)
    if not device:
        raise files.UserError("--image needs --device: h100, a100-80 or a TOML file")
    shape, where = _shape(image), load(device)
    capacity = memory or where.memory.usable
    plans, refused = _plans(model, shape, devices, where, precision)
    plans.sort(key=lambda plan: (plan.memory > capacity, plan.seconds))
    fits = sum(plan.memory <= capacity for plan in plans)
    record = {
        "model": model,
        "image": shape,
        "devices": devices,
        "memory": capacity,
        "fitting": fits,
        "refused": refused,
        "cuts": [_record(plan, capacity) for plan in plans],
    }
    if json_file == "-":
        print(json.dumps(record, indent=1))
        return fits > 0
    _show(model, shape, where, capacity, plans, refused, rows)
    if json_file:
        files.write_json(Path(json_file), record)
        _print(f"wrote {json_file}")
    return fits > 0


def _check_options(ctx: typer.Context) -> None:
    """Refuse options of transformers' layouts."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name not in OPTIONS and source is not None and source.name == "COMMANDLINE":
            raise files.UserError(
                f"{parameter.opts[0]} is for models of text; --image takes --model, --devices, "
                "--device, --memory, --precision, --rows and --json"
            )


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){2,4}", text):
        raise files.UserError(
            f"--image must be batch, channels and one to three extents, as 1x4x30000x30000; "
            f"got {text!r}"
        )
    shape = tuple(map(int, text.split("x")))
    if 0 in shape:
        raise files.UserError(f"--image {text} has a dim without rows")
    return shape


def _plans(
    model: str, shape: tuple[int, ...], devices: int, device: Device, precision: str
) -> tuple[list[SpatialPlan], dict[str, str]]:
    """Return the plans of all cuts, and why others are refused."""
    import torch

    from fusedops import UnsupportedError
    from fusedops.cli.image_models import image_model
    from fusedops.planner import spatial_plan
    from fusedops.planner.spatial import cuts_of

    if precision not in PRECISIONS:
        known = " and ".join(PRECISIONS)
        raise files.UserError(f"--precision of an image is one of {known}, got {precision!r}")
    dtype = getattr(torch, PRECISIONS[precision])
    plans: list[SpatialPlan] = []
    refused: dict[str, str] = {}
    try:
        module = image_model(model, channels=shape[1], ndim=len(shape) - 2)
        cuts = cuts_of(devices, shape)
        if not cuts:
            raise files.UserError(f"--devices {devices}: no cut gives each of them a row")
        for cut in cuts:
            single = plans[0].single if plans else None
            try:
                plans.append(spatial_plan(module, shape, cut, device, dtype=dtype, single=single))
            except UnsupportedError as error:
                refused[_named(cut)] = str(error)
    except (ValueError, TypeError) as error:
        raise files.UserError(str(error)) from None
    return plans, refused


def _record(plan: SpatialPlan, memory: int) -> dict[str, Any]:
    return {
        "cut": plan.cut,
        "fits": plan.memory <= memory,
        "memory": plan.memory,
        "seconds": plan.seconds,
        "efficiency": plan.efficiency,
        "input": plan.input,
        "parameters": plan.parameters,
        "single": asdict(plan.single),
        "ranks": [asdict(rank) for rank in plan.ranks],
    }


def _show(
    model: str,
    shape: tuple[int, ...],
    device: Device,
    memory: int,
    plans: list[SpatialPlan],
    refused: dict[str, str],
    rows: int,
) -> None:
    from rich.table import Table

    from fusedops.planner import show_bytes
    from fusedops.terminal.console import console, number_columns, print_table

    for cut, reason in refused.items():
        _print(f"{cut} is refused: {reason}")
    if not plans:
        return
    first = plans[0]
    single = first.single
    _print(
        f"{model}: {show_bytes(first.parameters)} of parameters, an input of {_named(shape)} "
        f"({first.input / 1e9:.3g} GB), {first.devices} x {device.name} ({show_bytes(memory)})"
    )
    _print(
        f"one device: {show_bytes(single.saved)} saved, {single.seconds:.4g} s of "
        f"{single.flops / 1e12:.3g} TFLOP"
    )
    columns = ("input", "saved", "memory", "halo", "halo grad", "other sent")
    times = ("compute s", "halo s", "waits s", "step s", "efficiency")
    table = Table("cut", *number_columns(*columns, *times), header_style="bold")
    for plan in plans[:rows]:
        sizes = ("input", "saved")
        sent = ("halo_forward", "halo_backward", "reduced")
        style = "green" if plan.memory <= memory else "red"
        table.add_row(
            _named(plan.cut),
            *(show_bytes(plan.most(name)) for name in sizes),
            f"[{style}]{show_bytes(plan.memory)}[/]",
            *(show_bytes(plan.most(name)) for name in sent),
            *(f"{plan.most(f'{name}_seconds'):.3g}" for name in ("compute", "halo", "exposed")),
            f"{plan.seconds:.4g}",
            f"{plan.efficiency:.0%}",
        )
    print_table(console(), table)
    fits = sum(plan.memory <= memory for plan in plans)
    _print(
        f"{fits} of {len(plans)} cuts fit; of the busiest device, forward and backward of one "
        "step; sorted: what fits, by seconds"
    )


def _named(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _print(text: str) -> None:
    from fusedops.terminal.console import console

    console().print(text, highlight=False, markup=False, soft_wrap=True)
