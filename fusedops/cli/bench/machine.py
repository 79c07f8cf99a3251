"""Where a measurement was made: the device, its clocks, the versions of what ran.

``slug`` names the folder of ``bench/results`` that a device's figures go to.
"""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fusedops._core import host

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
_ARM_PARTS = {
    "0xd0c": "neoverse-n1",
    "0xd40": "neoverse-v1",
    "0xd49": "neoverse-n2",
    "0xd4f": "neoverse-v2",
}


@dataclass(frozen=True)
class Machine:
    """What two measurements must share before their times may be compared.

    Attributes:
        slug: the device in one word, ``"cpu-zen5"`` or ``"h200"``.
        device: ``"cpu"`` or ``"cuda"``.
        name: the device as it calls itself.
        threads: of torch, on the CPU; 0 on a GPU, where they do not matter.
        cache_bytes: last-level cache of a CPU, L2 of a GPU.
    """

    slug: str
    device: str
    name: str
    threads: int
    cache_bytes: int


def machine(device: torch.device) -> Machine:
    """Return the machine that ``device`` is on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        slug = _slug(properties.name.removeprefix("NVIDIA "))
        return Machine(slug, "cuda", properties.name, 0, int(properties.L2_cache_size))
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    return Machine(cpu_slug(info), "cpu", name, torch.get_num_threads(), _last_level_cache())


def cpu_slug(info: dict[str, str]) -> str:
    """Return the CPU in one word, from the fields of ``/proc/cpuinfo``.

    Example:
        >>> cpu_slug({"vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"})
        'cpu-zen5'
        >>> cpu_slug({"model name": "Weird CPU @ 3 GHz"})
        'cpu-weird-cpu-3-ghz'
    """
    family = int(info.get("cpu family", -1)) if info.get("cpu family", "").isdigit() else -1
    model = int(info.get("model", -1)) if info.get("model", "").isdigit() else -1
    known: str | None = None
    if info.get("vendor_id") == "AuthenticAMD":
        ranges = _AMD_ZEN.get(family, ())
        known = next((name for name, low, high in ranges if low <= model <= high), None)
    elif info.get("vendor_id") == "GenuineIntel" and family == 6:
        known = _INTEL_FAMILY_6.get(model)
    elif "CPU part" in info:
        known = _ARM_PARTS.get(info["CPU part"])
    return f"cpu-{known or _slug(info.get('model name') or platform.machine())}"


def versions() -> dict[str, str]:
    """Return the versions of everything that a time depends on; absent packages are left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fusedops", "triton", "transformers", "liger-kernel"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["kernel"] = platform.release()
    found["libc"] = " ".join(platform.libc_ver())
    found["torch CPU capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = gpu_state().get("driver_version", "unknown")
    return found


def git_commit() -> dict[str, Any]:
    """Return the commit of the source tree and whether it has changes; empty outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return {}
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changed)} if commit else {}


def gpu_state() -> dict[str, str]:
    """Return clocks, power, temperature and driver of the GPU as nvidia-smi tells them now."""
    fields = (
        *("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw"),
        *("power.limit", "temperature.gpu", "persistence_mode"),
    )
    answer = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    values = [value.strip() for value in (answer.splitlines() or [""])[0].split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine and its settings as they go into the JSON record."""
    record: dict[str, Any] = asdict(machine(device))
    record["memory_allocator"] = host.other_allocator() or "libc"
    if device.type == "cuda":
        record["gpu_state"] = gpu_state()
    return record


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in first if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _last_level_cache() -> int:
    largest = 0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)([KMG]?)", index.read_text().strip())
        if size is not None:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size.group(2)]
            largest = max(largest, int(size.group(1)) * scale)
    return largest


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
