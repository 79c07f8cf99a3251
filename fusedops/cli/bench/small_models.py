"""What ``fusedops bench device``, ``generate`` and ``scaling`` show and write: small models."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from fusedops.bench.device import DeviceStep, MeasuredDevice
from fusedops.bench.generation import GenerationRow
from fusedops.bench.scaling import ScalingRow, ScalingWork, predicted
from fusedops.bench.tables import kendall_tau
from fusedops.cli.bench import options
from fusedops.planner import Device
from fusedops.terminal import files
from fusedops.terminal.console import console, number_columns, show_table


def write_device(measured: MeasuredDevice, out: Path) -> None:
    """Write the file of a device, and show how far its predictions are from the steps."""
    own = measured.device
    source = f"fitted on {len(measured.steps)} steps of small models on this machine"
    files.write_text(out, device_toml(own, asdict(own.efficiency), source))
    figures = ("width", "layers", "tokens", "measured ms", "predicted ms", "error")
    cells = map(_device_cells, measured.steps, measured.errors)
    show_table(console(), ("processes", *number_columns(*figures)), cells, title=own.name)
    print(f"wrote {out}: fusedops plan time --device {out}")


def device_toml(device: Device, efficiency: dict[str, float], source: str) -> str:
    """Return the text of a device's file; ``source`` says where the efficiencies are from."""
    lines = [f"name = {_shown(device.name)}"]
    lines += [f"threads = {device.threads}"] if device.threads else []
    tables: dict[str, dict[str, Any]] = {
        "memory": asdict(device.memory),
        "peak": device.peak,
        "links": asdict(device.links),
        "efficiency": efficiency,
        "sources": {**device.sources, "efficiency": source},
    }
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_shown(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML quotes texts as JSON does
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _device_cells(step: DeviceStep, error: float) -> list[object]:
    shape = step.shape
    sizes = {name: getattr(shape, name) for name in ("dp", "zero", "tp", "cp", "pp")}
    shown = [f"{name} {size}" for name, size in sizes.items() if size > (name != "zero")]
    shown += [name for name in ("sp", "overlap_microbatches") if getattr(shape, name)]
    tokens = f"{shape.micro_batch} x {shape.seq_len} x {shape.microbatches}"
    times = (f"{1e3 * step.seconds * factor:.1f}" for factor in (1, 1 + error))
    figures = (shape.hidden, shape.layers, tokens, *times, f"{100 * error:+.0f} %")
    return [", ".join(shown) or "1", *figures]


def show_generation(rows: list[GenerationRow], out: Console) -> None:
    """Print the rows of ways to generate."""
    figures = number_columns("tokens/s", "ours to it", "same tokens")
    cells = []
    for row in rows:
        reached = f"{row.tokens_per_second:.0f}", row.shown_ratio, f"{row.same:.0%}"
        cells.append((row.work.preset, row.work.dtype, row.name, *reached))
    columns = ("architecture", *number_columns("dtype"), "by", *figures)
    show_table(out, columns, cells, title="generating")


def setting_names(text: str, known: dict[str, str]) -> list[str]:
    """Return the names in a comma-separated list; all without one."""
    if not text:
        return list(known)
    # Names hold commas: "dp2,zero1" is one where there is one of that name.
    words, names = text.replace(" ", "").split(","), []
    while words:
        pair = ",".join(words[:2])
        name = pair if len(words) > 1 and pair in known else words[0]
        options.check_known(name, known, "setting")
        names.append(name)
        words = words[1 + name.count(",") :]
    return names


def show_scaling(
    rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console
) -> None:
    """Print the rows of settings, and what the planner predicts of them."""
    figures = number_columns("processes x threads", "tokens/s", "of the first", "loss")
    cells = []
    for row in rows:
        size = f"{row.setting.processes} x {row.setting.threads}"
        reached = f"{row.tokens_per_second:.0f}", row.shown_ratio, f"{row.loss:.4f}"
        cells.append((row.setting.name, size, *reached))
    show_table(out, ("setting", *figures), cells, title="a training step")
    if devices:
        _show_predicted(rows, work, devices, out)


def _show_predicted(
    rows: list[ScalingRow], work: ScalingWork, devices: list[Device], out: Console
) -> None:
    """Print the planner's seconds of each setting, their errors, and whether the order is right."""
    cells, pairs = [], []
    for row in rows:
        seconds, measured = predicted(work, row.setting, devices), statistics.median(row.seconds)
        if seconds is not None:
            pairs.append((seconds, measured))
            times = f"{1e3 * measured:.1f}", f"{1e3 * seconds:.1f}"
            cells.append((row.setting.name, *times, f"{seconds / measured - 1:+.0%}"))
    columns = ("setting", *number_columns("measured ms", "predicted ms", "error"))
    names = " and ".join(device.name for device in devices)
    show_table(out, columns, cells, title=f"predicted steps, {names}")
    errors = [abs(seconds / measured - 1) for seconds, measured in pairs]
    out.print(
        f"mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}; Kendall's tau of "
        f"the order {kendall_tau(pairs):.2f}"
    )
