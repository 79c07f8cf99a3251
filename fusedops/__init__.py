"""Fused transformer kernels as torch operators, and ``patch``, which uses them in a model.

    import fusedops
    print(fusedops.patch(model))

The import does not need Triton, a compiler, transformers or a GPU: fewer backends are available
without them (``fusedops doctor`` lists them).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusedops import ops
from fusedops._core import backends as _backends
from fusedops._core.backends import counters, reset_counters, resolve, use_backend
from fusedops._core.checks import UnsupportedError
from fusedops._core.library import tag_compiled_code as _tag_compiled_code
from fusedops.ops import *  # noqa: F403

if TYPE_CHECKING:
    from fusedops import (
        checkpoint,
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
    from fusedops._core.host import tune_host
    from fusedops.generation import generate
    from fusedops.integrations import (
        PatchReport,
        decompositions,
        describe,
        patch,
        register_attention,
        register_experts,
        unpatch,
    )
    from fusedops.integrations.graph.passes import compile_passes
    from fusedops.planner.sharding import auto_parallel
    from fusedops.testing import verify

__version__ = "0.1.0"

# Imported when first used: the rest of the package does without them.
_LAZY = {
    "auto_parallel": "fusedops.planner.sharding",
    "checkpoint": "fusedops.checkpoint",
    "generate": "fusedops.generation",
    "generation": "fusedops.generation",
    "memory": "fusedops.memory",
    "models": "fusedops.models",
    "nn": "fusedops.nn",
    "optim": "fusedops.optim",
    "parallel": "fusedops.parallel",
    "parity": "fusedops.parity",
    "planner": "fusedops.planner",
    "testing": "fusedops.testing",
    "train": "fusedops.train",
    "tune_host": "fusedops._core.host",
    "compile_passes": "fusedops.integrations.graph.passes",
    "decompositions": "fusedops.integrations",
    "describe": "fusedops.integrations",
    "patch": "fusedops.integrations",
    "unpatch": "fusedops.integrations",
    "PatchReport": "fusedops.integrations",
    "register_attention": "fusedops.integrations",
    "register_experts": "fusedops.integrations",
    "verify": "fusedops.testing",
}

__all__ = [
    "PatchReport",
    "UnsupportedError",
    "auto_parallel",
    "checkpoint",
    "compile_passes",
    "counters",
    "decompositions",
    "describe",
    "generate",
    "generation",
    "memory",
    "models",
    "nn",
    "optim",
    "parallel",
    "patch",
    "planner",
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
__all__ += ops.__all__

_backends.start()
_tag_compiled_code()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(_LAZY[name])
        return module if _LAZY[name] == f"fusedops.{name}" else getattr(module, name)
    raise AttributeError(f"module 'fusedops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "ops", *(name for name in globals() if name.startswith("__"))})
