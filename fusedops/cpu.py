"""Products and attention of torch in half precision on the CPU, by the kernels of fusedops.

    import fusedops.cpu

    fusedops.cpu.enable()  # or FUSEDOPS_CPU=1, or ``with fusedops.cpu.enabled():``

Without AVX512_BF16 or AMX, torch multiplies bfloat16 tens of times slower than float32, and float16
without AVX512_FP16 or AMX_FP16. ``enable`` replaces torch's own kernels of ``mm``, ``addmm``,
``addmv``, ``bmm``, ``baddbmm`` and ``scaled_dot_product_attention`` in the dispatcher of this
process, so that programs which know nothing of fusedops use ours: forward and backward, eager and
compiled. Everything else is torch's. The kernels are in C++ (csrc/cpu/common/torch_kernels.cpp).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from fusedops._core import extension
from fusedops._core.checks import UnsupportedError
from fusedops.runtime.architecture import cpuinfo

__all__ = ["counts", "disable", "enable", "enabled", "is_enabled"]


def enable() -> None:
    """Compute torch's half-precision products and attention on the CPU with kernels of fusedops.

    Which dtypes are replaced depends on the processor: bfloat16 where it has no AMX, float16 where
    it has neither AVX512_FP16 nor AMX_FP16. Calls with other dtypes, layouts or devices run torch's
    kernels. Products accumulate in float32 and are rounded once. Calling it again has no effect.

    Raises:
        UnsupportedError: the C++ kernels are not there; the message says why.

    Example:
        >>> import torch, fusedops.cpu
        >>> with fusedops.cpu.enabled():
        ...     product = torch.ones(64, 64).half() @ torch.ones(64, 64).half()
        >>> product[0, 0]
        tensor(64., dtype=torch.float16)
    """
    missing = extension.cpu_library()
    if missing is not None:
        raise UnsupportedError(f"fusedops.cpu.enable: the C++ kernels are missing: {missing}")
    served = _served()
    torch.ops.fusedops_native.replace_torch_kernels(
        torch.bfloat16 in served, torch.float16 in served, _LEAST
    )


def disable() -> None:
    """Restore torch's kernels. Without ``enable`` before, it has no effect."""
    if extension.cpu_library() is None:
        torch.ops.fusedops_native.restore_torch_kernels()


def is_enabled() -> bool:
    """Return whether ``enable`` is in effect."""
    return extension.cpu_library() is None and bool(
        torch.ops.fusedops_native.torch_kernels_are_replaced()
    )


def state() -> str:
    """Return in a few words which dtypes ``enable`` replaces here, and whether it has."""
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in _served())
    if not names:
        return "torch's own: none is known to be slow here"
    if is_enabled():
        return f"{names} by fusedops.cpu"
    return f"torch's own; fusedops.cpu.enable() is faster in {names}"


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """``enable`` for a block, of all threads; nested blocks have no effect."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def counts() -> dict[str, int]:
    """Return how many calls of each operator and dtype our kernels computed since ``enable``."""
    if extension.cpu_library() is not None:
        return {}
    return dict(torch.ops.fusedops_native.replaced_calls())


@functools.cache
def _served() -> tuple[torch.dtype, ...]:
    """Return the dtypes in which torch is slower than our kernels on this processor."""
    isa = torch.ops.fusedops_native.isa_in_use()
    if isa in ("default", "avx2", "avx512"):
        return torch.bfloat16, torch.float16
    has_float16 = {"avx512_fp16", "amx_fp16"} & {*cpuinfo().get("flags", "").split()}
    float16 = () if has_float16 else (torch.float16,)
    return (torch.bfloat16, *float16) if isa == "avx512_bf16" else float16


# Of fewer multiplications torch is as fast (docs/half_precision.md).
_LEAST = 1 << 9
