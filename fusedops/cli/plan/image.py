"""``fusedops plan image``: cuts of a convolutional model over devices, sorted by seconds."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops.cli.plan import arguments
from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.planner import Device, SpatialPlan

PRECISIONS = {"float32": "float32", "half": "bfloat16"}


def image(
    model: Annotated[str, typer.Option(help="unet, or package:function of a module.")] = "unet",
    shape: Annotated[
        str, typer.Option(help="Of the input: batch, channels and extents, as 1x4x30000x30000.")
    ] = "",
    devices: arguments.Devices = 8,
    device: arguments.Device = "",
    memory: arguments.DeviceMemory = "",
    precision: Annotated[str, typer.Option(help="float32 or half.")] = "float32",
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 12,
    json_file: arguments.JsonFile = "",
) -> None:
    """Print the cuts of a convolutional model's input over the devices, fastest first.

    The command exits with 1 if no cut fits. The bytes and times are explained in docs/spatial.md.
    """
    from fusedops.cli.device_file import load

    with files.one_line_errors():
        arguments.check_files(json_file)
        if not device:
            raise files.UserError("--device is missing: h100, a100-80 or a TOML file")
        sizes, where = _shape(shape), load(device)
        capacity = arguments.device_memory(device, memory)
        plans, refused = _plans(model, sizes, devices, where, precision)
        plans.sort(key=lambda plan: (plan.memory > capacity, plan.seconds))
        fits = sum(plan.memory <= capacity for plan in plans)
        record = {
            "model": model,
            "image": sizes,
            "devices": devices,
            "memory": capacity,
            "fitting": fits,
            "refused": refused,
            "cuts": [_record(plan, capacity) for plan in plans],
        }
        if json_file == "-":
            print(json.dumps(record, indent=1))
        else:
            _show(model, sizes, where, capacity, plans, refused, rows)
            if json_file:
                files.write_json(Path(json_file), record)
                _print(f"wrote {json_file}")
    if not fits:
        raise typer.Exit(1)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){2,4}", text):
        raise files.UserError(
            f"--shape must be batch, channels and one to three extents, as 1x4x30000x30000; "
            f"got {text!r}"
        )
    shape = tuple(map(int, text.split("x")))
    if 0 in shape:
        raise files.UserError(f"--shape {text} has a dim without rows")
    return shape


def _plans(
    model: str, shape: tuple[int, ...], devices: int, device: Device, precision: str
) -> tuple[list[SpatialPlan], dict[str, str]]:
    """Return the plans of all cuts, and why others are refused."""
    import torch

    from fusedops import UnsupportedError
    from fusedops.cli.plan.image_models import image_model
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
