"""Tensors that Triton kernels find by addresses in a table, which the strict interpreter checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from fusedops._core import env


def reachable(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Tell the interpreter, where it runs, of tensors that no launch has as an argument."""
    if not env.triton_interpreted():
        return contextlib.nullcontext()
    import triton_interpreter_strict

    return triton_interpreter_strict.reachable(list(tensors))
