"""The compiled libraries of this checkout: built where they are missing, and what they run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def build(seconds: float, log: Path) -> str | None:
    """Build the libraries; one that is up to date is kept.

    Returns:
        Why they are not all there, ``None`` when they are.
    """
    with log.open("w") as file:
        try:
            subprocess.run(
                [sys.executable, "setup.py", "build_ext", "--inplace"],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, seconds),
            )
        except subprocess.TimeoutExpired:
            return f"the build took more than {seconds:.0f} s"
    return None


def describe() -> dict[str, Any]:
    """Return facts of the machine and why each library is absent, seen by a process of its own.

    The process that starts the others never touches the GPU.
    """
    command = [sys.executable, "-m", "first_gpu.library"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"gpu": None, "missing": {"all": f"importing fusedops fails: {last}"}}
    return json.loads(done.stdout.splitlines()[-1])


def _look() -> dict[str, Any]:
    import torch

    from first_gpu import stand_in
    from fusedops._core import extension

    stand_in.install_if_asked(driver=False)
    reasons = {
        "libfusedops_cpu.so": extension.cpu_library(),
        "libfusedops_cuda.so": extension.cuda_library(),
        "Triton": extension.triton_missing(),
    }
    if stand_in.present():
        del reasons["libfusedops_cuda.so"]  # the stand-in runs no CUDA C++
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": None,
        "missing": {name: reason for name, reason in reasons.items() if reason is not None},
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        major, minor = torch.cuda.get_device_capability(0)
        found |= {
            "gpu": facts.name,
            "capability": 10 * major + minor,
            "multiprocessors": facts.multi_processor_count,
            "memory": facts.total_memory,
        }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


if __name__ == "__main__":
    print(json.dumps(_look()))
