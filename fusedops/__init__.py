"""Fused transformer kernels as torch operators, and ``patch``, which uses them in a model.

    import fusedops
    print(fusedops.patch(model))

The import registers ``torch.ops.fusedops.*``. It does not need Triton, a compiler, transformers or
a GPU: fewer backends are available without them (``fusedops doctor`` lists them). Only in the
process of the command line does it leave torch to the subcommand that needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedops import (
        checkpoint,
        cpu,
        generation,
        memory,
        models,
        nn,
        optim,
        parallel,
        planner,
        testing,
        train,
    )
    from fusedops.generation import generate
    from fusedops.integrations import (
        PatchReport,
        describe,
        patch,
        register_attention,
        register_experts,
        unpatch,
    )
    from fusedops.integrations.decompositions import decompositions
    from fusedops.integrations.graph.passes import compile_passes
    from fusedops.models.huggingface.quantized import load_quantized
    from fusedops.nn.quantize import QuantizationReport, quantize
    from fusedops.planner.sharding import auto_parallel
    from fusedops.runtime.host import tune_host
    from fusedops.testing import verify

__version__ = "0.1.0"

# Imported when first used: the rest of the package does without them.
_LAZY = {
    "UnsupportedError": "fusedops._core.checks",
    "auto_parallel": "fusedops.planner.sharding",
    "checkpoint": "fusedops.checkpoint",
    "counters": "fusedops._core.backends",
    "cpu": "fusedops.cpu",
    "generate": "fusedops.generation",
    "generation": "fusedops.generation",
    "load_quantized": "fusedops.models.huggingface.quantized",
    "memory": "fusedops.memory",
    "models": "fusedops.models",
    "nn": "fusedops.nn",
    "ops": "fusedops.ops",
    "optim": "fusedops.optim",
    "parallel": "fusedops.parallel",
    "planner": "fusedops.planner",
    "quantize": "fusedops.nn.quantize",
    "QuantizationReport": "fusedops.nn.quantize",
    "reset_counters": "fusedops._core.backends",
    "resolve": "fusedops._core.backends",
    "testing": "fusedops.testing",
    "train": "fusedops.train",
    "tune_host": "fusedops.runtime.host",
    "compile_passes": "fusedops.integrations.graph.passes",
    "decompositions": "fusedops.integrations",
    "describe": "fusedops.integrations",
    "patch": "fusedops.integrations",
    "unpatch": "fusedops.integrations",
    "PatchReport": "fusedops.integrations",
    "register_attention": "fusedops.integrations",
    "register_experts": "fusedops.integrations",
    "use_backend": "fusedops._core.backends",
    "verify": "fusedops.testing",
}

__all__ = [
    "PatchReport",
    "QuantizationReport",
    "UnsupportedError",
    "auto_parallel",
    "checkpoint",
    "compile_passes",
    "counters",
    "cpu",
    "decompositions",
    "describe",
    "generate",
    "generation",
    "load_quantized",
    "memory",
    "models",
    "nn",
    "optim",
    "parallel",
    "patch",
    "planner",
    "quantize",
    "register_attention",
    "register_experts",
    "reset_counters",
    "resolve",
    "testing",
    "train",
    "tune_host",
    "unpatch",
    "use_backend",
    "verify",
]


def _runs_command() -> bool:
    """Return whether this process was started as ``fusedops`` or ``python -m fusedops``.

    The command imports torch when a subcommand needs it: help must not wait for it.
    """
    if sys.argv and os.path.basename(sys.argv[0]) == "fusedops":
        return True
    # While Python locates the module of -m, sys.argv[0] is "-m" and the arguments follow it.
    if sys.argv[:1] != ["-m"]:
        return False
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return module in ("fusedops", "fusedops.__main__", "fusedops.cli.main")


_RUNS_COMMAND = _runs_command()

if TYPE_CHECKING or not _RUNS_COMMAND:
    from fusedops import ops
    from fusedops._core import env
    from fusedops._core.backends import counters, reset_counters, resolve, use_backend
    from fusedops._core.checks import UnsupportedError
    from fusedops.ops import *  # noqa: F403

    __all__ += ops.__all__
    if env.replaces_torch_products():
        importlib.import_module("fusedops.cpu").enable()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(_LAZY[name])
        return module if _LAZY[name] == f"fusedops.{name}" else getattr(module, name)
    if _RUNS_COMMAND and not name.startswith("__"):
        operators = importlib.import_module("fusedops.ops")
        if name in operators.__all__:
            return getattr(operators, name)
    raise AttributeError(f"module 'fusedops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "ops", *(name for name in globals() if name.startswith("__"))})
