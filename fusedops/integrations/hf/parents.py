"""Modules that their parent never calls: its forward reads their parameters.

``nn.MultiheadAttention`` computes with ``self.out_proj.weight``. To replace the forward of such a
child would change nothing. The code of the parent says it, as far as it names the child itself.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from fusedops.integrations.hf.class_table import weakly_cached
from fusedops.integrations.hf.original_code import with_inner
from fusedops.integrations.hf.rules.rule import rule_of

_PARAMETERS = ("weight", "bias", "p")


def only_read(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that no parent calls and one reads, each with that parent's class name."""
    readers: dict[nn.Module, str] = {}
    called: set[nn.Module] = set()
    for parent in model.modules():
        rule = rule_of(parent)
        cls: Any = type(parent) if rule is None else rule.original
        read = _read_children(cls)
        for name, child in parent._modules.items():
            if child is not None and name in read and "forward" not in parent.__dict__:
                readers[child] = cls.__name__
            elif child is not None:
                called.add(child)
    return {child: cls for child, cls in readers.items() if child not in called}


@weakly_cached
def _read_children(cls: Any) -> frozenset[str]:
    """Return the attributes of which the forward of ``cls`` reads parameters, and nothing else."""
    read: set[str] = set()
    other: set[str] = set()
    for code in _codes(cls):
        instructions = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
        for instruction, following in zip(instructions, instructions[1:], strict=False):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                reads = following.opname == "LOAD_ATTR" and following.argval in _PARAMETERS
                (read if reads else other).add(instruction.argval)
    return frozenset(read - other)


def _codes(cls: Any) -> Iterator[CodeType]:
    """Yield the code of the forward of ``cls`` and of the methods that it names."""
    names, done = ["forward"], {"forward"}
    while names:
        function: Any = inspect.unwrap(getattr(cls, names.pop()))
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        for part in with_inner(code):
            yield part
            methods = {
                name for name in part.co_names if inspect.isfunction(getattr(cls, name, None))
            }
            names += methods - done
            done |= methods
