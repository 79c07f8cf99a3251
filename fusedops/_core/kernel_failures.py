"""Triton kernels that do not compile or exceed a GPU's resources, and the calls that need them.

What a kernel needs in registers and shared memory is known when it is compiled for the GPU at hand,
at its first launch. The failure is recorded by what a compilation depends on, so that the next
backend serves such calls from then on without another attempt. This module does not choose: that is
``backends.py``.
"""

from __future__ import annotations

import subprocess
from typing import Any

import torch

_REASONS: dict[tuple[Any, ...], str] = {}
# What compilers below Triton raise as a plain RuntimeError: MLIR's passes, a missing host compiler.
_MESSAGES = ("PassManager", "C compiler")


def exceptions() -> tuple[type[Exception], ...]:
    """Return the types to catch around a Triton launcher; ``describe`` has the message of each."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError, RuntimeError, subprocess.CalledProcessError)


def describe(error: Exception) -> str | None:
    """Return why a kernel cannot run on this machine, ``None`` for any other kind of error."""
    if isinstance(error, RuntimeError) and not any(text in str(error) for text in _MESSAGES):
        return None
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def record(name: str, backward: bool, args: tuple[Any, ...], reason: str) -> None:
    """Remember that calls like this one cannot run on Triton."""
    _REASONS[_key(name, backward, args)] = reason


def recorded(name: str, backward: bool, args: tuple[Any, ...]) -> str | None:
    """Return why calls like this one cannot run on Triton, ``None`` where none has failed."""
    return _REASONS.get(_key(name, backward, args)) if _REASONS else None


def clear() -> None:
    """Forget all failures: the next call of each kernel tries again."""
    _REASONS.clear()


def _key(name: str, backward: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (name, backward, *map(_compiled_for, args))


def _compiled_for(arg: Any) -> Any:
    """Return what a compilation can depend on: device, dtype and last size of a tensor, options."""
    if isinstance(arg, torch.Tensor):
        return (arg.device, arg.dtype, arg.shape[-1:])
    if isinstance(arg, (list, tuple)):
        return tuple(map(_compiled_for, arg))
    return arg
