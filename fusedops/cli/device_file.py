"""Files of devices: the one that ``--device`` names, and the text that a measurement writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fusedops.terminal import files

if TYPE_CHECKING:
    from fusedops.planner import Device


def load(name: str) -> Device:
    """Return a known device, or that of a file; whatever is wrong is the user's."""
    from fusedops.launch.config_table import InputError
    from fusedops.planner import load_device

    try:
        return load_device(name)
    except InputError as error:
        raise files.UserError(str(error)) from None


def device_toml(device: Device, efficiency: dict[str, float], source: str) -> str:
    """Return the text of a device's file; ``source`` says where the efficiencies are from."""
    lines = [f'name = "{device.name}"']
    lines += [f"threads = {device.threads}"] if device.threads else []
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


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
