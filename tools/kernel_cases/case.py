"""One compilation of the static report, described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedops.kernels import _launch

# The dtypes of matrix kernels, and their names in Triton.
DTYPES = ((torch.bfloat16, "bf16"), (torch.float32, "fp32"))


def report_case(
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    options: dict[str, Any] = _launch.FOUR_WARPS,
    *,
    label: str = "",
    suffix: str = "",
    matrix: bool = False,
    few_rows: bool = False,
    resident: int | None = None,
    capabilities: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Describe one compilation for the static report (``tools/kernel_report.py``).

    Args:
        kernel: a ``@triton.jit`` function.
        types: argument name -> Triton type string; names that the kernel lacks are left out. Others
            than these are bfloat16 pointers (``*_ptr``) or 32-bit integers.
        constexprs: argument name -> value.
        options: launch options: ``num_warps``, ``num_stages``.
        label: what distinguishes the case, before its block sizes.
        suffix: the same, behind them.
        matrix: whether the kernel must use matrix instructions.
        few_rows: whether the call has fewer rows than a warp-group instruction (64).
        resident: programs that the grid gives a multiprocessor, ``None`` for as many as fit.
        capabilities: GPUs that run this configuration (80, 90, 100, 120), all by default.
    """
    others = (name for name in kernel.arg_names if name not in types)
    types = types | {name: "*bf16" if name.endswith("_ptr") else "i32" for name in others}
    # Of the function, because a kernel of the interpreter does not list its parameters.
    kinds = kernel.fn.__annotations__
    runtime = {name for name in kernel.arg_names if "constexpr" not in str(kinds.get(name, ""))}
    runtime -= set(constexprs)
    blocks = [f"{name}={value}" for name, value in constexprs.items() if name.startswith("BLOCK")]
    return {
        "kernel": kernel,
        "signature": {name: kind for name, kind in types.items() if name in runtime},
        "constexprs": {
            name: value for name, value in constexprs.items() if name in kernel.arg_names
        },
        "num_warps": options.get("num_warps", 4),
        "num_stages": options.get("num_stages", 1),
        "matrix": matrix,
        "few_rows": matrix and few_rows,
        "resident": resident,
        "capabilities": capabilities,
        "label": ", ".join(filter(None, (label, *blocks, suffix))),
    }


def descriptor_type(name: str, block: Sequence[int]) -> str:
    """Return the type of a descriptor as the static report names it."""
    return f"tensordesc<{name}[{','.join(map(str, block))}]>"
