"""Where a measurement was made: the device, its clocks, the versions of what ran.

``slug`` names the folder of ``bench/results`` that a device's figures go to.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fusedops._core import env
from fusedops.runtime import architecture, host


@dataclass(frozen=True)
class Machine:
    """What two measurements must share before their times may be compared."""

    slug: str  # the device in one word, ``"cpu-zen5"`` or ``"h200"``
    device: str  # ``"cpu"`` or ``"cuda"``
    name: str  # the device as it calls itself
    threads: int  # of torch, on the CPU; 0 on a GPU, where they do not matter
    cache_bytes: int  # last-level cache of a CPU, L2 of a GPU


def machine(device: torch.device) -> Machine:
    """Return the machine that ``device`` is on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        slug = architecture.slug(properties.name.removeprefix("NVIDIA "))
        return Machine(slug, "cuda", properties.name, 0, int(properties.L2_cache_size))
    info = architecture.cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    word, max_isa = architecture.cpu_slug(info), env.max_isa()
    if max_isa is not None:  # one processor in the place of another: bench/README.md
        name, word = f"{name} limited to {max_isa}", f"{word}-as-{max_isa.replace('_', '-')}"
    return Machine(word, "cpu", name, torch.get_num_threads(), _last_level_cache())


def versions() -> dict[str, str]:
    """Return the versions of everything that a time depends on; absent packages are left out."""
    result = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fusedops", "triton", "transformers", "liger-kernel"):
        with suppress(metadata.PackageNotFoundError):
            result[package] = metadata.version(package)
    result["kernel"] = platform.release()
    result["libc"] = " ".join(platform.libc_ver())
    result["torch CPU capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        result["cuda"] = str(torch.version.cuda)
        result["driver"] = gpu_state().get("driver_version", "unknown")
    return result


def git_commit() -> dict[str, Any]:
    """Return the commit of the source tree and whether it has changes; empty outside of one."""
    root = Path(__file__).resolve().parents[2]
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


def now() -> str:
    """Return the UTC time as a record has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def provenance(device: torch.device) -> dict[str, Any]:
    """Return where, with what and when a measurement was made, as its record begins."""
    return {
        "machine": describe(device),
        "versions": versions(),
        "git": git_commit(),
        "created": now(),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine and its settings as they go into the JSON record."""
    record: dict[str, Any] = asdict(machine(device))
    record["memory_allocator"] = host.other_allocator() or "libc"
    if device.type == "cuda":
        record["gpu_state"] = gpu_state()
    return record


def _last_level_cache() -> int:
    largest = 0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = re.fullmatch(r"(\d+)([KMG]?)", index.read_text().strip())
        if size is not None:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size.group(2)]
            largest = max(largest, int(size.group(1)) * scale)
    return largest


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
