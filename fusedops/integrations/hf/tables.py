"""The rules that there are: those of the tables, and those for classes known by their code.

A class of torch or of transformers' activations has its rule in a table. Any other class takes the
rule of one whose code is the same and listed (``known_code.py``), or one that ``rules`` makes from
what its code computes or calls.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from torch import nn

from fusedops.integrations.hf import families, known_code
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import name_of
from fusedops.integrations.hf.rules.rule import PatchRule, registering_bases

# Module with RULES -> the module that must be loaded for its classes to exist.
_TABLES = {
    "fusedops.integrations.hf.rules.torch_modules": "torch",
    "fusedops.integrations.hf.rules.torch_functions": "torch",
    "fusedops.integrations.hf.rules.chain": "torch",
    "fusedops.integrations.hf.rules.torch_transformer": "torch",
    "fusedops.integrations.hf.rules.transformers_modules": "transformers.activations",
    "fusedops.integrations.hf.rules.bloom_gelu": "transformers.models.bloom.modeling_bloom",
    "fusedops.integrations.megatron.rules": "megatron.core.transformer.mlp",
}

# Sections of known_code.toml with the classes of ``families.RULES``.
_SECTIONS = ("opt", "bert", "t5", "whisper", "gated_norms")

_LOG = logging.getLogger("fusedops")

# The rule of a class without a table, or why there is none although there might be.
_BY_CODE: ClassTable[PatchRule | str | None] = ClassTable("rule")

# The newest Python whose bytecode the rules know how to read.
_NEWEST_PYTHON = (3, 14)
# Function that returns the rule of a class or None -> its module, and the one that must be loaded
# for it; in the order of precedence.
_MAKERS = {
    "attention_rule": ("attention", "transformers.modeling_utils"),
    "experts_rule": ("experts", "transformers.integrations.moe"),
    "mixer_rule": ("mixers", "transformers.modeling_utils"),
    "rule_by_code": ("by_code", "torch"),
    "attention_call_rule": ("torch_functions", "torch"),
    "processor_rule": ("attention_processors", "torch"),
    "loss_call_rule": ("torch_functions", "torch"),
}


def rules() -> dict[type, PatchRule]:
    """Return the rules of the tables whose classes exist in this process, by original class."""
    loaded = (table for table, needed in _TABLES.items() if needed in sys.modules)
    return {cls: rule for table in loaded for cls, rule in _rules_in(table).items()}


@functools.cache
def _rules_in(table: str) -> dict[type, PatchRule]:
    return {rule.original: rule for rule in importlib.import_module(table).RULES}


def rule_of_class(cls: type) -> PatchRule | None:
    """Return the rule of a class: its table's, or that for its code."""
    rule = rule_or_refusal(cls)
    return rule if isinstance(rule, PatchRule) else None


def rule_or_refusal(cls: type) -> PatchRule | str | None:
    """Return the rule of a class, or why there is none although its code might have one."""
    for table, needed in _TABLES.items():
        if needed in sys.modules and cls in _rules_in(table):
            return _rules_in(table)[cls]
    if not _has_own_code(cls):
        return None
    if cls not in _BY_CODE:
        _BY_CODE[cls] = _made(cls)
    return _BY_CODE[cls]


def _made(cls: type) -> PatchRule | str | None:
    """Return the rule of a class without a table, or the reason why none could be made."""
    if sys.version_info[:2] > _NEWEST_PYTHON:
        return "its code is that of a later Python than the rules know"
    actor = _acts_on_derived_classes(cls)
    if actor is not None:
        return f"{actor} acts for each class that is derived from it"
    try:
        loaded = "transformers.modeling_utils" in sys.modules
        rule = _of_known_code(cls) if loaded else None
        reasons = (known_code.unknown_code(cls, section) for section in _SECTIONS)
        return rule or _of_own_code(cls) or next(filter(None, reasons), None)
    except Exception as error:  # a class may do anything where it is looked at
        reason = f"its code could not be read: {type(error).__name__}: {error}"
        _LOG.warning("fusedops.patch: %s is not replaced: %s", name_of(cls), reason)
        return reason


def _acts_on_derived_classes(cls: type) -> str | None:
    """Return whose code would have to run when a class is derived from ``cls``.

    That of a metaclass of a user; or of a base of a user, where one of transformers has work too.
    """
    users, metaclass = registering_bases(cls), type(cls)
    if metaclass.__module__.partition(".")[0] not in ("abc", "builtins", "torch", "transformers"):
        return metaclass.__name__
    named = [base for base in cls.__mro__ if "__init_subclass__" in vars(base)]
    works = any(base.__module__.startswith("transformers.") for base in named)
    return users[0].__name__ if users and works else None


def _has_own_code(cls: type) -> bool:
    """Return whether a class has code of its own and a place from which it can be imported.

    ``fully_shard`` and parametrizations make classes for an instance, which have none.
    """
    package = cls.__module__.partition(".")[0]
    return (
        package not in ("torch", "fusedops")
        and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        and not any("fused_rule" in vars(base) for base in cls.__mro__)
    )


def _of_own_code(cls: type[nn.Module]) -> PatchRule | None:
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    has_own_call = any("__call__" in vars(base) for base in bases)
    for function, (module, needed) in _MAKERS.items():
        if needed not in sys.modules or (has_own_call and needed == "torch"):
            continue
        make: Any = getattr(importlib.import_module(f"{__package__}.rules.{module}"), function)
        rule: PatchRule | None = make(cls)
        if rule is not None:
            return rule
    return None


def _of_known_code(cls: type[nn.Module]) -> PatchRule | None:
    for section in _SECTIONS:
        name = known_code.known_as(cls, section)
        if name is not None:
            name = name.partition(".")[2]
            rule: PatchRule = families.RULES[name](cls)
            rule.copy_of = None if cls.__name__ == name else name
            return rule
    return None
