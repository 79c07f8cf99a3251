"""Makes bfloat16 and masks right in Triton's interpreter (3.6 to 3.9), for tests.

The interpreter keeps bfloat16 values as raw uint16: its ``dot`` multiplies those integers, and its
cast from float32 truncates where hardware rounds to nearest even. Both are replaced here; import
this module before kernels run.

It also takes a comparison of two integers for an integer: spread over a block, it makes a mask of
integers, which the loads of 3.9 refuse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_original_dot = InterpreterBuilder.create_dot
_original_cast = InterpreterBuilder.cast_impl
_original_splat = InterpreterBuilder.create_splat


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bit patterns of float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _as_float32(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> Any:
    return _original_dot(self, _as_float32(a), _as_float32(b), *rest)


def _cast(self: Any, source: TensorHandle, target: Any) -> Any:
    to_bf16 = target.scalar == tl.bfloat16
    if _is_bf16(source) and not to_bf16:
        source = _as_float32(source)
        return source if target.scalar == tl.float32 else _original_cast(self, source, target)
    if source.dtype.scalar == tl.float32 and to_bf16:
        return TensorHandle(narrow(source.data), tl.bfloat16)
    return _original_cast(self, source, target)


def _cast_by_name(self: Any, source: TensorHandle, target: Any) -> Any:
    return self.cast_impl(source, target)


def _splat(self: Any, shape: Any, source: TensorHandle) -> Any:
    if source.data.dtype == np.bool_:
        source = TensorHandle(source.data, tl.int1)
    return _original_splat(self, shape, source)


InterpreterBuilder.create_dot = _dot
InterpreterBuilder.create_splat = _splat
InterpreterBuilder.cast_impl = _cast
for _name in ("create_fp_ext", "create_fp_trunc", "create_fp_to_si", "create_fp_to_ui"):
    setattr(InterpreterBuilder, _name, _cast_by_name)
