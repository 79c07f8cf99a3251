"""``fusedops plan --evaluate`` and ``--calibrate``: the planner's clock against measured steps."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from typing import TYPE_CHECKING

from fusedops.terminal import files

if TYPE_CHECKING:
    from rich.console import Console

    from fusedops.planner import Device
    from fusedops.planner.device import MeasuredLayer
    from fusedops.planner.evaluation import Evaluation, GroupRanking

# Groups of so many layouts and more are listed one by one.
_LISTED = 15


def evaluate(path: str, out: str, device: str) -> None:
    """Predict the steps of a CSV file, write it with the predictions, and print the errors."""
    from fusedops.planner import evaluation

    if out:
        files.check_writable(out)
    rows = _rows(path)
    result = evaluation.evaluate(rows, load(device) if device else None)
    if out:
        text = StringIO()
        writer = csv.DictWriter(text, [*rows[0], *evaluation.PREDICTED], extrasaction="ignore")
        writer.writeheader()
        for row, prediction in zip(rows, result.predictions, strict=True):
            writer.writerow({**row, **prediction.cells()})
        files.write_text(out, text.getvalue())
    from rich.console import Console

    _show(result, Console())
    if out:
        print(f"wrote {out}")


def calibrate(path: str, out: str, device: str) -> None:
    """Fit a device's efficiencies on the steps of a CSV file, and write the device's TOML file."""
    from fusedops.planner import evaluation
    from fusedops.planner.calibration import calibrate, measured_layers
    from fusedops.terminal.progress import activity

    if not device or not out:
        raise files.UserError("--calibrate needs --device, where it begins, and --out FILE.toml")
    files.check_writable(out)
    here, rows = replace(load(device), layers=()), _rows(path)
    steps = [(shape, here, seconds) for shape, _, seconds in evaluation.measured_steps(rows, here)]
    names = (
        *("products", "attention", "elementwise", "layer_seconds"),
        *("node", "network", "ring"),
    )
    if len(steps) < len(names):
        raise files.UserError(
            f"{path} has {len(steps)} measured steps that can be predicted, and {len(names)} "
            "constants are fitted: measure more layouts or sizes"
        )
    with activity(f"fitting {len(names)} constants on {len(steps)} steps"):
        fitted = calibrate(steps, here.efficiency, names=names)
    here = replace(here, layers=tuple(measured_layers(steps, fitted)))
    source = f"fitted on {len(steps)} steps of {path}"
    reserved = evaluation.measured_reserve(rows, here)
    if reserved is not None:
        here = replace(
            here,
            memory=replace(here.memory, reserved=reserved),
            sources={**here.sources, "reserved": f"median of the rows of {path} with mem_gib"},
        )
        print(f"{reserved / 2**30:.2f} GiB of a device hold no tensors of the step (reserved)")
    files.write_text(out, device_toml(here, asdict(fitted), source))
    print(f"wrote {out}: use it with --device {out}")


def device_toml(device: Device, efficiency: dict[str, float], source: str) -> str:
    """Return the text of a device's file; ``source`` says where the efficiencies are from."""
    lines = [f'name = "{device.name}"']
    lines += [f"threads = {device.threads}"] if device.threads else []
    lines += layers_toml(device.layers)
    tables = {
        "memory": asdict(device.memory),
        "peak": device.peak,
        "links": asdict(device.links),
        "efficiency": efficiency,
    }
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_shown(value)}" for key, value in table.items()]
    sources = {**device.sources, "efficiency": source}
    lines += ["", "[sources]"]
    lines += [f"{key} = {_quoted(value)}" for key, value in sources.items()]
    return "\n".join(lines) + "\n"


def layers_toml(layers: Sequence[MeasuredLayer]) -> list[str]:
    """Return the lines of measured layers, which stand before the tables of a device's file."""
    if not layers:
        return []
    rows = [
        ", ".join(f"{key} = {_shown(value)}" for key, value in asdict(layer).items())
        for layer in layers
    ]
    return ["layers = [", *(f"  {{ {row} }}," for row in rows), "]"]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _rows(path: str) -> list[dict[str, str]]:
    from fusedops.launch.config_table import InputError
    from fusedops.planner import evaluation

    try:
        return evaluation.load_rows(path)
    except InputError as error:
        raise files.UserError(str(error)) from None


def load(name: str) -> Device:
    """Return a known device, or that of a file; whatever is wrong is the user's."""
    from fusedops.launch.config_table import InputError
    from fusedops.planner import load_device

    try:
        return load_device(name)
    except InputError as error:
        raise files.UserError(str(error)) from None


def _show(result: Evaluation, console: Console) -> None:
    from rich.table import Table

    missing = [prediction.why for prediction in result.predictions if prediction.step_s is None]
    errors = Table("source", "steps", "error", "peaks", "error", title="Mean absolute errors")
    for source in dict.fromkeys([*result.errors, *result.memory_errors]):
        of_steps, of_peaks = result.errors.get(source), result.memory_errors.get(source)
        errors.add_row(source, *_cells(of_steps), *_cells(of_peaks))
    if errors.rows:
        console.print(errors)
    large = [group for group in result.groups if group.layouts >= _LISTED]
    if large:
        ranks = Table("group", "layouts", "Kendall's tau", "first choice slower by")
        for group in large:
            ranks.add_row(
                group.name, str(group.layouts), f"{group.tau:.2f}", f"{100 * group.slower:.1f} %"
            )
        console.print(ranks)
    if result.groups:
        console.print(_summary(result.groups))
    said = (
        ("ran are said to fit", result.fitting),
        ("ran out of memory are said not to fit", result.unfitting),
    )
    for text, (right, count) in said:
        if count:
            console.print(f"{right} of {count} layouts that {text}")
    if missing:
        reasons = ", ".join(f"{missing.count(why)} x {why}" for why in dict.fromkeys(missing))
        console.print(f"{len(missing)} rows without a prediction: {reasons}")


def _cells(error: tuple[float, int] | None) -> tuple[str, str]:
    """Return the cells of the number of rows and their error."""
    return (str(error[1]), f"{error[0]:.1f} %") if error else ("", "")


def _summary(groups: Sequence[GroupRanking]) -> str:
    tau = statistics.fmean(group.tau for group in groups)
    slower = max(group.slower for group in groups)
    return (
        f"{len(groups)} groups of the same model, devices and global batch: mean of Kendall's tau "
        f"{tau:.2f}, a first choice is at most {100 * slower:.1f} % slower than the best"
    )
