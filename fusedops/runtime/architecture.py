"""Devices by the name of their architecture: ``"cpu-zen5"``, ``"sm_90"``.

What calibration found holds for one architecture (``hf/calibration.py``). The name of the
CPU's is also that of the folder with its measurements in ``bench/results``.
"""

from __future__ import annotations

import functools
import platform
import re

import torch

from fusedops._core.capability import compute_capability

# CPU family and model (from /proc/cpuinfo) -> the microarchitecture's name. AMD numbers a range
# of models per generation; Intel gives each its own.
_AMD_ZEN: dict[int, tuple[tuple[str, int, int], ...]] = {
    23: (("zen", 0x00, 0x2F), ("zen2", 0x30, 0xFF)),
    25: (
        *(("zen3", 0x00, 0x0F), ("zen4", 0x10, 0x1F), ("zen3", 0x20, 0x5F)),
        *(("zen4", 0x60, 0x7F), ("zen4", 0xA0, 0xAF)),
    ),
    26: (("zen5", 0x00, 0xFF),),
}
_INTEL_FAMILY_6 = {
    85: "skylake-sp",
    106: "icelake-sp",
    143: "sapphire-rapids",
    173: "granite-rapids",
    207: "emerald-rapids",
}


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the architecture of a device: ``sm_90`` by compute capability, ``gfx942`` on ROCm."""
    if device.type == "cpu":
        return cpu_slug(cpuinfo())
    if device.type == "cuda":
        capability = compute_capability(device)
        if capability is None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return "sm_{}{}".format(*capability)
    return device.type


def is_by_intel() -> bool:
    """Return whether the processor is one by Intel."""
    return cpuinfo().get("vendor_id") == "GenuineIntel"


def cpu_slug(info: dict[str, str]) -> str:
    """Return the CPU in one word, ``cpu-zen5``, from the fields of ``/proc/cpuinfo``."""
    family, model = (
        int(info[name]) if info.get(name, "").isdigit() else -1 for name in ("cpu family", "model")
    )
    known: str | None = None
    if info.get("vendor_id") == "AuthenticAMD":
        ranges = _AMD_ZEN.get(family, ())
        known = next((name for name, low, high in ranges if low <= model <= high), None)
    elif info.get("vendor_id") == "GenuineIntel" and family == 6:
        # A virtual machine may report another model's number, of which AMX is no feature.
        has_amx = "amx_bf16" in info.get("flags", "").split()
        known = _INTEL_FAMILY_6.get(model, "xeon-amx" if has_amx else None)
    return f"cpu-{known or slug(info.get('model name') or platform.machine())}"


def cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor of ``/proc/cpuinfo``; empty where there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(1 << 14).split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def slug(name: str) -> str:
    """Return a name in lower case, with dashes for all that is no letter or digit."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
