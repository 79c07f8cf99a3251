"""The last launch of a Triton kernel in this process, in a small file that outlives the process.

A launch is written before it is made, so that after an illegal access, a hang or a crash the file
has the launch that was under way. Launches are asynchronous: only under ``CUDA_LAUNCH_BLOCKING=1``
is it the one that failed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def record(path: Path) -> None:
    """Write each launch of this process to ``path`` from now on, in place of the one before."""
    from triton.runtime.jit import JITFunction

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    launch = JITFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        told = {"item": os.environ.get("FIRST_GPU_ITEM"), **describe(self, args, kwargs, grid)}
        text = json.dumps(told).encode()
        os.pwrite(file, text, 0)
        os.ftruncate(file, len(text))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = recorded


def describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Any:
    """Return a launch as JSON has it: kernel, grid, compile-time constants and arguments."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    options = set(values) - set(kernel.arg_names)
    return {
        "kernel": kernel.__name__,
        "grid": list(grid) if isinstance(grid, (tuple, list)) else str(grid),
        "constexprs": {name: str(values[name]) for name in values if name in constants},
        "options": {name: str(values[name]) for name in values if name in options},
        "arguments": {
            name: _argument(value)
            for name, value in values.items()
            if name not in constants and name not in options
        },
    }


def last(path: Path, item: str | None) -> Any:
    """Return the launch that is in a file, ``None`` where there is none of this item."""
    try:
        launch = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return launch if launch.pop("item") == item else None


def _argument(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"descriptor of {_argument(value.base)} in blocks {list(value.block_shape)}"
    if hasattr(value, "data_ptr") and hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} strides {list(value.stride())}"
    return str(value)
