"""Loads the compiled libraries and says clearly why one is absent.

The libraries hold operators only (no Python symbols): they register themselves with torch's
dispatcher when loaded. ``fusedops_native::*`` are the generic autograd, autocast and routing
kernels that ``library.py`` installs for each op. ``fusedops_cpp::X`` for the CPU and
``fusedops_cuda::X`` for CUDA are the kernels of the op X. They are registered without a schema and
get that of the op from ``declare``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from fusedops._core import env, library_fit
from fusedops._core.library_fit import HOW_TO_BUILD

_LOG = logging.getLogger("fusedops")
_DECLARED: dict[str, torch.library.Library] = {}  # namespace -> owner of the schemas
_DECLARING = threading.Lock()


@functools.cache
def cpu_library() -> str | None:
    """Load the CPU library; return ``None`` when it is there, else the reason why it is not.

    The reason is also logged, in one line, unless the user wants no library.
    """
    reason = _load("libfusedops_cpu.so")
    first_of_machine = (env.launched() or (0, 1, 0))[2] == 0
    if reason is not None and not env.native_disabled() and first_of_machine:
        _LOG.warning("fusedops runs without its C++ kernels, slower on the CPU: %s", reason)
    return reason


@functools.cache
def cuda_library() -> str | None:
    """Load the CUDA library; return ``None`` when it is there, else the reason why it is not."""
    if not torch.cuda.is_available():
        return "this torch sees no CUDA device"
    return cpu_library() or _load("libfusedops_cuda.so")


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


def library_path(file_name: str) -> Path:
    """Return where a library for this torch lies, or would lie."""
    return library_fit.folder_for(env.library_folder(), torch.__version__) / file_name


def has_operator(namespace: str, name: str) -> bool:
    """Return whether a loaded library registered a kernel of the op ``name`` in this namespace."""
    return torch._C._dispatch_has_kernel(f"{namespace}::{name}")


def declare(namespace: str, name: str, schema: str) -> None:
    """Give a kernel of a loaded library the schema of its op.

    The operator ``namespace::name`` is private and trusts its caller. ``fusedops::name`` checks a
    call against the op's contract before it calls the kernel, where a second check would cost every
    call. Whoever calls the kernel itself with arguments that the contract refuses reads and writes
    memory that is not the tensors' own.

    Raises:
        RuntimeError: if the kernel's arguments are not those of the schema.
    """
    if namespace not in _DECLARED:
        _DECLARED[namespace] = torch.library.Library(namespace, "FRAGMENT")
    try:
        _DECLARED[namespace].define(name + schema)
    except RuntimeError as error:
        raise RuntimeError(
            f"the compiled kernel {namespace}::{name} does not fit the schema {schema} of its op; "
            f"if the library is older than these sources, {HOW_TO_BUILD}"
        ) from error


def private_operator(namespace: str, name: str) -> Any:
    """Return the kernel of an op in a loaded library; it is declared if it was not yet."""
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, name):
        with _DECLARING:
            if not hasattr(operators, name):
                schema = str(getattr(torch.ops.fusedops, name).default._schema)
                declare(namespace, name, schema[schema.index("(") :])
    return getattr(operators, name).default


def _load(file_name: str) -> str | None:
    if env.native_disabled():
        return f"FUSEDOPS_DISABLE_NATIVE={env.settings()['FUSEDOPS_DISABLE_NATIVE']} is set"
    path = library_path(file_name)
    if not path.exists():
        return library_fit.why_missing(env.library_folder(), file_name, torch.__version__)
    stamp = _stamp(path.with_suffix(".json"))
    if not library_fit.fits_torch(stamp.get("torch", torch.__version__), torch.__version__):
        return (
            f"{path} was built for torch {stamp['torch']}, this is {torch.__version__}: "
            f"{HOW_TO_BUILD}"
        )
    missing = library_fit.wrong_system(stamp)
    if missing:
        return f"{path} {missing}: {HOW_TO_BUILD}"
    missing = _instruction_sets_missing(stamp.get("isas", ""))
    if missing:
        return f"{path} {missing}: {HOW_TO_BUILD}; FUSEDOPS_ISAS=all makes one for any machine"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = " ".join(str(error).split())
        return f"{path} does not load with torch {torch.__version__} ({cause}): {HOW_TO_BUILD}"
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
