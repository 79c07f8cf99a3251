"""Loads the compiled libraries and says clearly why one is absent.

The libraries hold operators only (no Python symbols): they register themselves with torch's
dispatcher when loaded, ``fusedops_cpp::*`` for the CPU and ``fusedops_cuda::*`` for CUDA, plus
``fusedops_native::*``, the generic autograd, autocast and routing kernels that ``library.py``
installs for each op.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import sys
from pathlib import Path

import torch

from fusedops._core import env

_LOG = logging.getLogger("fusedops")

HOW_TO_BUILD = "build it with `python setup.py build_ext --inplace` (needs g++ 11 or newer)"


@functools.cache
def cpu_library() -> str | None:
    """Load the CPU library; return ``None`` when it is there, else the reason why it is not."""
    return _load("libfusedops_cpu.so")


@functools.cache
def cuda_library() -> str | None:
    """Load the CUDA library; return ``None`` when it is there, else the reason why it is not."""
    if not torch.cuda.is_available():
        return "this torch sees no CUDA device"
    missing = cpu_library() or _load("libfusedops_cuda.so")
    if missing is None and not env.launch_plans_disabled():
        torch.ops.fusedops_native.set_launch_driver(
            torch.ops.fusedops_cuda.launch_driver(), torch.device("cuda")
        )
    return missing


@functools.cache
def triton_missing() -> str | None:
    """Return ``None`` when Triton kernels can be launched here, else the reason."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed (pip install triton)"
    if not torch.cuda.is_available() and not env.triton_interpreted():
        return "no GPU, and TRITON_INTERPRET=1 is not set"
    return None


def has_operator(namespace: str, name: str) -> bool:
    """Return whether a loaded library registered ``namespace::name``."""
    return torch._C._dispatch_has_kernel(f"{namespace}::{name}")


def _load(file_name: str) -> str | None:
    if env.native_disabled():
        return f"FUSEDOPS_DISABLE_NATIVE={env.settings()['FUSEDOPS_DISABLE_NATIVE']} is set"
    path = env.library_folder() / file_name
    if not path.exists():
        return f"{path} does not exist: {HOW_TO_BUILD}"
    stamp = _stamp(path.with_suffix(".json"))
    if stamp.get("torch", torch.__version__) != torch.__version__:
        return (
            f"{path} was built for torch {stamp['torch']}, this is {torch.__version__}: "
            f"{HOW_TO_BUILD}"
        )
    missing = _instruction_sets_missing(stamp.get("isas", ""))
    if missing:
        return f"{path} {missing}: {HOW_TO_BUILD}; FUSEDOPS_ISAS=all makes one for any machine"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = f"{path} does not load with torch {torch.__version__} ({error}): {HOW_TO_BUILD}"
        _LOG.warning(reason)
        return reason
    if _is_stale(path, stamp):
        _LOG.warning(
            "%s was built from other sources than those in csrc: what they added or changed since "
            "runs on the reference or as it was; %s",
            path,
            HOW_TO_BUILD,
        )
    return None


def _is_stale(path: Path, stamp: dict[str, str]) -> bool:
    """Return whether a library in a checkout was built from other sources than are there now.

    Sources that are older than the library are not read: a look at their times takes 1 ms.
    """
    root = Path(__file__).resolve().parents[2]
    tool = root / "tools" / "native.py"
    if "sources" not in stamp or not tool.exists():
        return False  # an installed package: no sources
    built = path.stat().st_mtime
    files = [tool, tool.with_name("native_flags.py"), *(root / "csrc").rglob("*")]
    if all(file.stat().st_mtime <= built for file in files):
        return False
    spec = importlib.util.spec_from_file_location("_fusedops_native_build", tool)
    if spec is None or spec.loader is None:
        return False
    native = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = native  # its dataclasses look themselves up there
    spec.loader.exec_module(native)
    return bool(native.sources_digest() != stamp["sources"])


def _instruction_sets_missing(built: str) -> str | None:
    """Return why none of the instruction sets ``built`` (blanks between) runs here, or ``None``."""
    order = ["DEFAULT", "AVX2", "AVX512"]
    here = torch.backends.cpu.get_cpu_capability()
    runs = order[: order.index(here) + 1] if here in order else ["DEFAULT"]
    limit = env.max_isa()
    if limit is not None:
        runs = runs[: 1 + env.MAX_ISAS.index(limit)]
    if not built or set(built.split()) & set(runs):
        return None
    only = f"was built for {built.replace(' ', ', ')} only, and"
    if here in built.split():
        return f"{only} FUSEDOPS_MAX_ISA={limit}"
    return f"{only} torch runs at {here} here"


def _stamp(path: Path) -> dict[str, str]:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}
