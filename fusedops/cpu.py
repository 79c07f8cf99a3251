"""Matrix products of torch in half precision on the CPU, computed by the kernels of fusedops.

    import fusedops.cpu

    fusedops.cpu.enable()  # or FUSEDOPS_CPU=1, or ``with fusedops.cpu.enabled():``

Without AVX512_BF16 or AMX, torch multiplies bfloat16 tens of times slower than float32, and float16
without AVX512_FP16 or AMX_FP16. ``enable`` replaces torch's own kernels of ``mm``, ``addmm``,
``bmm`` and ``baddbmm`` in the dispatcher of this process, so that programs which know nothing of
fusedops use ours: forward and backward, eager and compiled. Everything else is torch's.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedops._core import extension
from fusedops._core.checks import UnsupportedError
from fusedops.runtime.architecture import cpuinfo

__all__ = ["counts", "disable", "enable", "enabled", "is_enabled"]

_library: torch.library.Library | None = None
_counts: Counter[str] = Counter()


def enable() -> None:
    """Compute torch's half-precision products on the CPU with the kernels of fusedops.

    Which dtypes are replaced depends on the processor: bfloat16 where it has neither AVX512_BF16
    nor AMX, float16 where it has neither AVX512_FP16 nor AMX_FP16. Calls with other dtypes, layouts
    or devices, and small ones, run torch's kernels. Products accumulate in float32 and are rounded
    once. Calling it again has no effect.

    Raises:
        UnsupportedError: the C++ kernels are not there; the message says why.

    Example:
        >>> import torch, fusedops.cpu
        >>> with fusedops.cpu.enabled():
        ...     product = torch.ones(64, 64).half() @ torch.ones(64, 64).half()
        >>> product[0, 0]
        tensor(64., dtype=torch.float16)
    """
    global _library
    if _library is not None:
        return
    missing = extension.cpu_library()
    if missing is not None:
        raise UnsupportedError(f"fusedops.cpu.enable: the C++ kernels are missing: {missing}")
    _counts.clear()
    _library = torch.library.Library("aten", "IMPL")
    linear_act = extension.private_operator("fusedops_cpp", "linear_act")
    baddbmm = extension.private_operator("fusedops_cpp", "baddbmm")

    def mm(a: Any, b: Any) -> torch.Tensor:
        return linear_act(a, b.t(), None, "identity", False)[0]

    def addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        if c.dim() == 1 and c.numel() == b.shape[1] and beta == alpha == 1:
            return linear_act(a, b.t(), c, "identity", False)[0]
        return product_and_addend(c, a, b, beta, alpha)

    def bmm(a: Any, b: Any) -> torch.Tensor:
        return product_and_addend(a.new_empty(1, 1, 1), a, b, 0, 1)

    def added(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
        return product_and_addend(c, a, b, beta, alpha)

    def product_and_addend(c: Any, a: Any, b: Any, beta: Any, alpha: Any) -> torch.Tensor:
        shape = (*a.shape[:-1], b.shape[-1])
        c = c[(None,) * (len(shape) - c.dim())]
        broadcast = [int(size == 1 != full) for size, full in zip(c.shape, shape, strict=True)]
        return baddbmm(c, a, b, float(beta), float(alpha), broadcast)

    _replace(_library, "mm", 2, mm)
    _replace(_library, "addmm", 2, addmm)
    _replace(_library, "bmm", 3, bmm)
    _replace(_library, "baddbmm", 3, added)


def disable() -> None:
    """Restore torch's kernels. Without ``enable`` before, it has no effect."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def is_enabled() -> bool:
    """Return whether ``enable`` is in effect."""
    return _library is not None


def state() -> str:
    """Return in a few words which products ``enable`` replaces here, and whether it has."""
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in _served())
    if not names:
        return "torch's own: none is known to be slow here"
    if is_enabled():
        return f"{names} by fusedops.cpu"
    return f"torch's own: slow in {names}; fusedops.cpu.enable() replaces them"


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
    """Return how many calls of each operator and dtype were computed since ``enable``."""
    return dict(_counts)


def _replace(
    library: torch.library.Library, name: str, rank: int, product: Callable[..., Any]
) -> None:
    """Replace torch's kernels of an operator: with a result of its own, into ``out``, in place."""
    adds = name in ("addmm", "baddbmm")

    def is_ours(*args: torch.Tensor, to: torch.Tensor | None = None) -> bool:
        """Return whether a call is computed here; where operands do not fit, torch raises."""
        a, b = args[-2:]
        if not _is_product(a, b, rank) or (adds and not _is_addend(args[0], a, b)):
            return False
        return to is None or (to.dtype == a.dtype and to.shape == (*a.shape[:-1], b.shape[-1]))

    def count(b: torch.Tensor) -> None:
        _counts[f"{name} {str(b.dtype).removeprefix('torch.')}"] += 1

    def replace(overload: str, compute: Callable[..., Any]) -> None:
        stock = torch.library.get_kernel(f"aten::{overload}", "CPU")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            library.impl(overload, functools.partial(compute, stock), "CPU", with_keyset=True)

    def result(stock: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(*args):
            return stock.call_boxed(keys, *args, **kwargs)
        count(args[-1])
        return product(*args, **kwargs)

    def into(stock: Any, keys: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
        if not is_ours(*args, to=out):
            return stock.call_boxed(keys, *args, out=out, **kwargs)
        count(args[-1])
        return out.copy_(product(*args, **kwargs))

    def in_place(stock: Any, keys: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(to, *args, to=to):
            return stock.call_boxed(keys, to, *args, **kwargs)
        count(args[-1])
        return to.copy_(product(to, *args, **kwargs))

    replace(name, result)
    replace(f"{name}.out", into)
    if adds:
        replace(f"{name}_", in_place)


@functools.cache
def _served() -> tuple[torch.dtype, ...]:
    """Return the dtypes that torch multiplies slowly on this processor."""
    flags = cpuinfo().get("flags", "").split()
    if torch.ops.fusedops_native.isa_in_use() in ("default", "avx2", "avx512"):
        return torch.bfloat16, torch.float16
    return () if {"avx512_fp16", "amx_fp16"} & {*flags} else (torch.float16,)


# Of fewer multiplications the call itself takes longer than torch (docs/half_precision.md).
_LEAST = 1 << 17


def _is_product(a: torch.Tensor, b: torch.Tensor, rank: int) -> bool:
    """Return whether our product of two tensors is right, and faster than torch's.

    One row times a weight ``[out, in]`` is torch's, which has a kernel for that.
    """
    return (
        a.dtype in _served()
        and b.dtype == a.dtype
        and a.dim() == b.dim() == rank
        and a.shape[-1] == b.shape[-2]
        and a.shape[:-2] == b.shape[:-2]
        and a.layout == b.layout == torch.strided
        and a.numel() * b.shape[-1] >= _LEAST
        and not (a.shape[-2] == 1 and b.stride(-2) == 1)
    )


def _is_addend(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a tensor has the dtype of the product and broadcasts to its shape."""
    shape = (*a.shape[:-1], b.shape[-1])
    pairs = zip(reversed(addend.shape), reversed(shape), strict=False)
    return (
        addend.dtype == a.dtype
        and addend.layout == torch.strided
        and addend.dim() <= len(shape)
        and all(size in (1, full) for size, full in pairs)
    )
