"""A case of the static report, and the call of an op that is derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Positional arguments alone, or a pair of these and a dict of keyword arguments.
Make = Callable[[torch.device, torch.dtype], Any]


@dataclass(frozen=True)
class ReportCase:
    """A configuration of the static report, as ``kernel_cases`` describes it."""

    described: dict[str, Any]

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.described["kernel"].__name__.strip("_")

    @property
    def types(self) -> dict[str, str]:
        """Argument name -> Triton's type."""
        return self.described["signature"]

    @property
    def is_float32(self) -> bool:
        """Whether the data are float32: no argument has half precision, and some has float32."""
        kinds = " ".join(self.types.values())
        half = any(name in kinds for name in ("bf16", "fp16", "i16"))
        return not half and any("fp32" in self.types.get(name, "") for name in _DATA)

    def runs_on(self, capability: int) -> bool:
        """Return whether the report compiles it for a GPU."""
        return capability in (self.described["capabilities"] or (80, 90, 100, 120))

    def __getitem__(self, name: str) -> Any:
        return self.described["constexprs"][name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a constant, or the default where the kernel has none of this name."""
        return self.described["constexprs"].get(name, default)


# Arguments that have the dtype of a call's data, in one kernel or another.
_DATA = ("x_ptr", "q_ptr", "a_ptr", "dy_ptr", "z_ptr", "values_ptr", "d_ptr")


@dataclass(frozen=True)
class HotCall:
    """A call that launches a case.

    Attributes:
        op: the op that is called: that of the kernel file, or one that shares its kernels.
        name: what tells it from others; calls of one name are one call.
        make: ``make(device, dtype)`` returns its arguments.
        random: whether it draws numbers (dropout).
        buffers: keyword argument that a gradient is added to -> position of the argument that it
            is the gradient of.
    """

    op: str
    name: str
    make: Make
    random: bool = False
    buffers: Mapping[str, int] = field(default_factory=dict)


def deep(block: int, granule: int = 16) -> int:
    """Return a size that takes three blocks, the last not full, and that 16 divides.

    16 because the report's machine code is that of sizes that 16 divides, as in practice.
    """
    return 2 * block + max(granule, block // 2 // granule * granule)
