"""``fusedops plan image``: cuts of a convolutional model over devices, sorted by seconds."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from fusedops.cli import output
from fusedops.cli.bench import options
from fusedops.cli.plan import arguments
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, print_line, show_table
from fusedops.terminal.sizes import show_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.planner import Device, SpatialPlan

PRECISIONS = {"float32": "float32", "half": "bfloat16"}


def image(
    model: Annotated[str, Option(help="unet, or package:function of a module.")] = "unet",
    shape: Annotated[str, Option(help="Of the input, as 1x4x30000x30000.")] = "",
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
        sizes, capacity = _shape(shape), arguments.device_memory(device, memory)
        plans, refused = _plans(model, sizes, devices, where, precision)
        plans.sort(key=lambda plan: (plan.memory > capacity, plan.seconds))
        record = {
            "model": model,
            "image": sizes,
            "devices": devices,
            "memory": capacity,
            "fitting": sum(plan.memory <= capacity for plan in plans),
            "refused": refused,
            "cuts": [_record(plan, capacity) for plan in plans],
        }
        output.deliver(record, json_file, partial(_show, record, plans, where.name, rows))
    if not record["fitting"]:
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

    options.check_known(precision, PRECISIONS, "precision of an image")
    dtype = getattr(torch, PRECISIONS[precision])
    plans: list[SpatialPlan] = []
    refused: dict[str, str] = {}
    with files.user_errors(ValueError, TypeError):
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
    return plans, refused


def _record(plan: SpatialPlan, memory: int) -> dict[str, Any]:
    names = ("cut", "memory", "seconds", "efficiency", "input", "parameters")
    return {
        **{name: getattr(plan, name) for name in names},
        "fits": plan.memory <= memory,
        "single": asdict(plan.single),
        "ranks": [asdict(rank) for rank in plan.ranks],
    }


def _show(
    record: dict[str, Any], plans: list[SpatialPlan], device: str, rows: int, out: Console
) -> None:
    for cut, reason in record["refused"].items():
        print_line(out, f"{cut} is refused: {reason}")
    if not plans:
        return
    first, memory = plans[0], record["memory"]
    single = first.single
    print_line(
        out,
        f"{record['model']}: {show_bytes(first.parameters)} of parameters, an input of "
        f"{_named(record['image'])} ({first.input / 1e9:.3g} GB), "
        f"{first.devices} x {device} ({show_bytes(memory)})",
    )
    print_line(
        out,
        f"one device: {show_bytes(single.saved)} saved, {single.seconds:.4g} s of "
        f"{single.flops / 1e12:.3g} TFLOP",
    )
    columns = ("input", "saved", "memory", "halo", "halo grad", "other sent")
    times = ("compute s", "halo s", "waits s", "step s", "efficiency")
    cells = (_cells(plan, memory) for plan in plans[:rows])
    show_table(out, ("cut", *number_columns(*columns, *times)), cells)
    print_line(
        out,
        f"{record['fitting']} of {len(plans)} cuts fit; of the busiest device, forward and "
        "backward of one step; sorted: what fits, by seconds",
    )


def _cells(plan: SpatialPlan, memory: int) -> list[str]:
    style = "green" if plan.memory <= memory else "red"
    sent = ("halo_forward", "halo_backward", "reduced")
    return [
        _named(plan.cut),
        *(show_bytes(plan.most(name)) for name in ("input", "saved")),
        f"[{style}]{show_bytes(plan.memory)}[/]",
        *(show_bytes(plan.most(name)) for name in sent),
        *(f"{plan.most(f'{name}_seconds'):.3g}" for name in ("compute", "halo", "exposed")),
        f"{plan.seconds:.4g}",
        f"{plan.efficiency:.0%}",
    ]


def _named(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
