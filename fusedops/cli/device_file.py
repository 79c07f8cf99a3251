"""The text of a device's file, which a measurement writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedops.planner import Device


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
