"""Attention of modules that hand their work to a processor, as those of diffusers do.

The ``__call__`` of ``self.processor`` calls ``F.scaled_dot_product_attention``, or diffusers'
``dispatch_attention_fn``. Other modules may share it, so it stays the object that it is. The
patched class has the same ``forward`` with another name for the attribute, ``fused_processor``: the
processor behind an object whose ``__call__`` has the same code with the fused attention.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import with_globals, with_other, with_others
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    subclass,
)
from fusedops.integrations.hf.rules.torch_functions import ATTENTION, attention_plan, fused_in_torch

_ATTRIBUTE, _FUSED = "processor", "fused_processor"
_DISPATCH, _REGISTRY = "dispatch_attention_fn", "_AttentionBackendRegistry"
_DIFFUSERS = "diffusers.models.attention_dispatch"
_NO_OPERATION = ("CACHE", "PUSH_NULL", "EXTENDED_ARG")
# Class of processors -> its ``__call__``, and the same code with the fused attention or ``None``.
_CALLS: ClassTable[tuple[Any, FunctionType | None]] = ClassTable("processor")


def processor_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class whose forward calls ``self.processor``, or ``None``."""
    forward = original.forward
    if not isinstance(forward, FunctionType) or not _reads_own_processor(forward):
        return None
    fused = with_globals(forward, forward.__globals__)
    names = {_ATTRIBUTE: _FUSED}
    read = tuple(names.get(name, name) for name in fused.__code__.co_names)
    fused.__code__ = fused.__code__.replace(co_names=read)
    patched = subclass(original, _Caller, forward=fused)
    return PatchRule(original, patched, "O3", _plan, copies_code=True)


def _reads_own_processor(forward: FunctionType) -> bool:
    """Return whether code reads ``self.processor``, and neither its type nor another's."""
    steps = [step for step in dis.get_instructions(forward) if step.opname not in _NO_OPERATION]
    owners = {
        owner.argval
        for owner, step in itertools.pairwise(steps)
        if step.argval == _ATTRIBUTE and step.opcode in dis.hasname
    }
    first = forward.__code__.co_varnames[0]
    asks_type = not {"type", "isinstance"}.isdisjoint(forward.__code__.co_names)
    assigns = any(step.argval == _ATTRIBUTE and step.opname == "STORE_ATTR" for step in steps)
    known = not hasattr(forward, "__wrapped__") and not asks_type and not assigns
    return known and owners == {first}


def _plan(module: Any) -> FusionPlan | Refusal:
    processor = getattr(module, _ATTRIBUTE, None)
    if not callable(processor):
        return NOT_APPLICABLE
    name = type(processor).__name__
    if _fused_call(type(processor)) is None:
        return Refusal(f"its {name} does not call F.{ATTENTION}")
    return attention_plan(f"the attention that its {name} calls")


class _FusedProcessor:
    """Calls a processor's code with the fused attention; all else is the processor's."""

    def __init__(self, processor: Any, fused: Any) -> None:
        self._processor, self._fused = processor, fused
        # Callers read its signature.
        self.__call__ = processor.__call__  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused(self._processor, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class _Caller(nn.Module):
    @property
    def fused_processor(self) -> Any:
        processor = self.processor
        fused = _fused_call(type(processor))
        return processor if fused is None else _FusedProcessor(processor, fused)


def _fused_call(cls: type) -> FunctionType | None:
    call: Any = getattr(cls, "__call__", None)  # noqa: B004 (its function, not whether there is one)
    if not isinstance(call, FunctionType):
        return None
    if cls not in _CALLS or _CALLS[cls][0] is not call:
        if torch.compiler.is_compiling():
            return None
        _CALLS[cls] = call, with_other(call, {ATTENTION, _DISPATCH}, _replacement, __name__)
    return _CALLS[cls][1]


def _replacement(value: Any) -> Any:
    diffusers = sys.modules.get(_DIFFUSERS)
    if diffusers is not None and value is getattr(diffusers, _DISPATCH):
        return _dispatch()
    return fused_in_torch(value)


class _FusedRegistry:
    """Diffusers' registry of backends, whose active one may be the fused one."""

    def __init__(self, registry: Any, stock: Any, fused: Any) -> None:
        self._registry, self._stock, self._fused = registry, stock, fused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def get_active_backend(self) -> tuple[Any, Any]:
        name, function = self._registry.get_active_backend()
        return name, self._fused if function is self._stock else function


@functools.cache
def _dispatch() -> Any:
    """Return the code of ``dispatch_attention_fn`` with a registry whose ``native`` is fused.

    ``None`` for a version of diffusers that keeps its backends in another way.
    """
    diffusers: Any = sys.modules[_DIFFUSERS]
    registry: Any = getattr(diffusers, _REGISTRY, None)
    stock: Any = getattr(diffusers, "_native_attention", None)
    native = None if stock is None else with_other(stock, {ATTENTION}, fused_in_torch, __name__)
    code: Any = inspect.unwrap(diffusers.dispatch_attention_fn)
    if native is None or "get_active_backend" not in code.__code__.co_names:
        return None
    fused = _FusedRegistry(registry, stock, native)
    return with_others(diffusers.dispatch_attention_fn, {_REGISTRY: fused}, __name__)
