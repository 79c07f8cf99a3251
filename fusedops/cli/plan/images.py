"""What ``fusedops plan image`` cuts and shows: a U-Net, or any importable model, over devices."""

from __future__ import annotations

import importlib
import re
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fusedops._core import checks
from fusedops.cli.bench import options
from fusedops.planner import Device, SpatialPlan, spatial_plan
from fusedops.planner.spatial import cuts_of
from fusedops.terminal import files
from fusedops.terminal.console import number_columns, print_line, show_table
from fusedops.terminal.sizes import show_bytes

PRECISIONS = {"float32": "float32", "half": "bfloat16"}


def read_shape(text: str) -> tuple[int, ...]:
    """Return the sizes of ``--shape``."""
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){2,4}", text):
        raise files.UserError(
            f"--shape must be batch, channels and one to three extents, as 1x4x30000x30000; "
            f"got {text!r}"
        )
    shape = tuple(map(int, text.split("x")))
    if 0 in shape:
        raise files.UserError(f"--shape {text} has a dim without rows")
    return shape


def plans_of(
    model: str, shape: tuple[int, ...], devices: int, device: Device, precision: str
) -> tuple[list[SpatialPlan], dict[str, str]]:
    """Return the plans of all cuts, and why others are refused."""
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
            except checks.UnsupportedError as error:
                refused[_named(cut)] = str(error)
    return plans, refused


def cut_record(plan: SpatialPlan, memory: int) -> dict[str, Any]:
    """Return a cut as JSON has it."""
    names = ("cut", "memory", "seconds", "efficiency", "input", "parameters")
    return {
        **{name: getattr(plan, name) for name in names},
        "fits": plan.memory <= memory,
        "single": asdict(plan.single),
        "ranks": [asdict(rank) for rank in plan.ranks],
    }


def show(
    record: dict[str, Any], plans: list[SpatialPlan], device: str, rows: int, out: Console
) -> None:
    """Print the refused cuts, the model, and a table of the others."""
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


_OP = "image_model"


class UNet(nn.Module):
    """A U-Net of signals, images or volumes with batch norm, for any extent.

    The first level has ``width`` channels, each other one twice those of the one above at half of
    its extent.
    """

    def __init__(self, channels: int, ndim: int = 2, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        kinds: dict[str, Any] = {
            name: getattr(nn, f"{name}{ndim}d")
            for name in ("Conv", "BatchNorm", "MaxPool", "ConvTranspose")
        }
        widths = [width << level for level in range(levels + 1)]
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.down = nn.ModuleList(
            [_block(kinds, channels, width), *(_block(kinds, a, b) for a, b in pairs)]
        )
        self.pool = kinds["MaxPool"](2, ceil_mode=True)
        self.grow = nn.ModuleList(
            kinds["ConvTranspose"](b, a, 2, stride=2) for a, b in reversed(pairs)
        )
        self.up = nn.ModuleList(_block(kinds, 2 * a, a) for a, _ in reversed(pairs))
        self.head = kinds["Conv"](width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x [B, channels, ...]``."""
        skips = [self.down[0](x)]
        for block in self.down[1:]:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            skip = skips.pop()
            # An odd extent was rounded up by the pooling.
            index = (..., *(slice(size) for size in skip.shape[2:]))
            x = block(torch.cat([grow(x)[index], skip], 1))
        return self.head(x)


def _block(kinds: dict[str, Any], channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        conv = kinds["Conv"](inputs, width, 3, padding=1, bias=False)
        layers += [conv, kinds["BatchNorm"](width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def image_model(name: str, channels: int = 3, ndim: int = 2) -> nn.Module:
    """Return a U-Net of so many channels and spatial dims, or what an importable function makes.

    ``name`` is ``"unet"``, or that of the function, as ``"torchvision.models:resnet50"``.
    """
    package, colon, function = name.partition(":")
    if not colon:
        if name != "unet":
            known = "unet, or package:function such as torchvision.models:resnet50"
            checks.fail(_OP, "name", known, name)
        with torch.device("meta"):
            return UNet(channels, ndim)
    try:
        module = getattr(importlib.import_module(package), function)()
    except Exception as error:  # of any kind: the function is the user's
        raise ValueError(f"{_OP}: {name} cannot be made: {error}") from error
    if not isinstance(module, nn.Module):
        checks.fail(_OP, name, "a function that returns an nn.Module", type(module).__name__)
    return module
