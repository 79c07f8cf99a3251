"""Fit constants of the planner's step time on tables of measured steps, and print the errors.

    python bench/planner/fit.py steps.csv one_node.csv=a100-40 --gpu A100,A800 --half
    python bench/planner/fit.py steps.csv --gpu H100 --device h100 --names float8,attention --half
    python bench/planner/fit.py mine.csv --device h100 --out mine.toml

A file may be followed by the device of rows that have none. The weight of a row is the root of
what it would be if all sources weighed alike. With --half only the first, third and so on row of
each file is fitted, and the errors of the others are those that docs/planning.md shows.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import evaluation

from fusedops.bench.calibration import Step, calibrate
from fusedops.bench.tables import load_rows
from fusedops.cli.bench.small_models import device_toml
from fusedops.planner import Device, load_device, step_time
from fusedops.planner.device import DeviceEfficiency
from fusedops.terminal import files

NAMES = (
    *("products", "attention", "outer", "elementwise", "overlap", "gather"),
    *("host_seconds", "host_spread", "microbatch_seconds"),
)


class _Row(NamedTuple):
    """A measured step of a table."""

    source: str
    step: Step
    first_half: bool  # the first, third and so on of its file
    cells: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print constants and errors, and write the device's file if asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="FILE.csv or FILE.csv=DEVICE")
    parser.add_argument("--gpu", default="", help="gpu of the rows that are read, by ,; all")
    parser.add_argument("--device", default="a100-80", help="device with the other constants")
    parser.add_argument("--names", default=",".join(NAMES), help="constants that are fitted, by ,")
    parser.add_argument("--half", action="store_true", help="fit every second row")
    parser.add_argument("--out", default="", help="TOML file of --device with the constants")
    options = parser.parse_args(arguments)
    names = options.names.split(",")
    try:
        if options.out:
            files.check_writable(options.out)
        device = load_device(options.device)
        rows = [row for text in options.files for row in _read(text, options.gpu, device)]
    except files.UserError as error:
        parser.error(str(error))
    fitted = [row for row in rows if row.first_half or not options.half]
    if len(fitted) < len(names):
        parser.error(
            f"{len(fitted)} measured steps can be predicted, and {len(names)} constants are "
            "fitted: measure more layouts or sizes, or name fewer constants"
        )
    numbers = Counter(row.source for row in fitted)
    weights = [numbers[row.source] ** -0.5 for row in fitted]
    steps = [row.step for row in fitted]
    usual = calibrate(steps, device.efficiency, names=names, weights=weights)
    for name in names:
        print(f"{name} = {getattr(usual, name):.4g}")
    _show("fitted", fitted, usual)
    if options.half:
        _show("not fitted", [row for row in rows if not row.first_half], usual)
    if options.out:
        cells = [row.cells for row in rows]
        reserved = evaluation.measured_reserve(cells, device)
        if reserved is not None:
            device = replace(device, memory=replace(device.memory, reserved=reserved))
            print(f"reserved = {reserved}, the median of the rows with mem_gib")
        source = f"fitted on {len(fitted)} steps of {', '.join(options.files)}"
        files.write_text(options.out, device_toml(device, asdict(usual), source))
        print(f"wrote {options.out}: use it with fusedops plan time --device {options.out}")


def _read(text: str, gpus: str, device: Device) -> list[_Row]:
    """Return the rows of a file that can be predicted.

    Args:
        text: FILE.csv or FILE.csv=DEVICE.
        gpus: those of the rows that are read, by comma; empty: all.
        device: of rows without gpu in a file without DEVICE.
    """
    name, _, own = text.partition("=")
    usual = load_device(own) if own else device
    known = gpus.split(",") if gpus else []
    return [
        _Row(cells.get("source") or name, step, number % 2 == 0, cells)
        for number, cells in enumerate(load_rows(name))
        if not known or cells.get("gpu", "") in ("", *known)
        for step in evaluation.measured_steps([cells], usual)
    ]


def _show(title: str, rows: Sequence[_Row], usual: DeviceEfficiency) -> None:
    """Print mean and largest error by source."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        shape, device, seconds = row.step
        predicted = step_time(shape, replace(device, efficiency=usual)).seconds
        errors.setdefault(row.source, []).append(abs(predicted / seconds - 1))
    for source, values in errors.items():
        mean, largest = statistics.fmean(values), max(values)
        print(f"{title}: {source}: {len(values)} steps, {mean:.1%} off, at most {largest:.1%}")


if __name__ == "__main__":
    main()
