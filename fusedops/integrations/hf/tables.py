"""The rules that there are: those of the tables, and those for classes known by their code.

A class of torch or of transformers' activations has its rule in a table. Any other class takes the
rule of one whose code is the same and listed (``known_code.py``). An attention that looks its
function up in transformers' registry needs no list: all ask the registry for the same, as experts
do. Nor does a norm or feed-forward layer whose code is an expression that is known
(``rules/by_code.py``), or attention that a class calls (``rules/functional_attention.py``).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import Any

from torch import nn

from fusedops.integrations.hf import known_code, patched
from fusedops.integrations.hf.class_table import ClassTable
from fusedops.integrations.hf.original_code import name_of, names_in, with_inner
from fusedops.integrations.hf.rules.rule import PatchRule, registering_bases

# Module with RULES -> the module that must be loaded for its classes to exist.
_TABLES = {
    "fusedops.integrations.hf.rules.torch_modules": "torch",
    "fusedops.integrations.hf.rules.functional_attention": "torch",
    "fusedops.integrations.hf.rules.sequential": "torch",
    "fusedops.integrations.hf.rules.torch_transformer": "torch",
    "fusedops.integrations.hf.rules.transformers_modules": "transformers.activations",
    "fusedops.integrations.hf.rules.bloom_gelu": "transformers.models.bloom.modeling_bloom",
    "fusedops.integrations.megatron.rules": "megatron.core.transformer.mlp",
}

# Section of known_code.toml -> the module with RULES for its classes.
_SECTIONS = {
    "opt": "families.opt",
    "bert": "families.bert",
    "t5": "families.t5",
    "whisper": "families.whisper",
}

_LOG = logging.getLogger("fusedops")

# The rule of a class without a table, or why there is none although there might be.
_BY_CODE: ClassTable[PatchRule | str | None] = ClassTable("rule")

# The newest Python whose bytecode the rules know how to read.
_NEWEST_PYTHON = (3, 14)


def rules() -> dict[type, PatchRule]:
    """Return the rules of the tables whose classes exist in this process, by original class."""
    by_class: dict[type, PatchRule] = {}
    for table, needed in _TABLES.items():
        if needed in sys.modules:
            by_class.update({rule.original: rule for rule in importlib.import_module(table).RULES})
    return by_class


def rule_of_class(cls: type) -> PatchRule | None:
    """Return the rule of a class: its table's, or that for its code."""
    ruled = rules()
    if cls in ruled:
        return ruled[cls]
    if not _has_own_code(cls):
        return None
    if cls not in _BY_CODE:
        _BY_CODE[cls] = _made(cls)
    rule = _BY_CODE[cls]
    return rule if isinstance(rule, PatchRule) else None


def refusal_of_class(cls: type) -> str | None:
    """Return why ``rule_of_class`` made no rule of a class whose code it did not read."""
    refusal = _BY_CODE.get(cls)
    return refusal if isinstance(refusal, str) else None


def _made(cls: type) -> PatchRule | str | None:
    """Return the rule of a class without a table, or the reason why none could be made."""
    if sys.version_info[:2] > _NEWEST_PYTHON:
        return "its code is that of a later Python than the rules know"
    actor = _acts_on_derived_classes(cls)
    if actor is not None:
        return f"{actor} acts for each class that is derived from it"
    try:
        rule = None
        if "transformers.modeling_utils" in sys.modules:
            rule = _of_known_code(cls) or _of_registry(cls) or _of_experts_registry(cls)
        return rule or _of_own_code(cls) or _unknown_code(cls)
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

    ``fully_shard`` and parametrizations make classes for an instance, which have none; one of torch
    or of this library has a rule in a table or none.
    """
    package = cls.__module__.partition(".")[0]
    return (
        package not in ("torch", "fusedops")
        and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        and not any("fused_rule" in vars(base) for base in cls.__mro__)
    )


def _of_own_code(cls: type[nn.Module]) -> PatchRule | None:
    """Return the rule for what the code of a class computes or calls, or ``None``."""
    if any("__call__" in vars(base) for base in cls.__mro__[: cls.__mro__.index(nn.Module)]):
        return None
    for module, function in _BY_OWN_CODE.items():
        make: Any = getattr(importlib.import_module(f"{__package__}.rules.{module}"), function)
        rule: PatchRule | None = make(cls, patched.module_of(cls))
        if rule is not None:
            return rule
    return None


# Module -> its function that returns the rule of a class, or None; in the order of precedence.
_BY_OWN_CODE = {
    "by_code": "rule_by_code",
    "functional_attention": "functional_attention_rule",
    "attention_processors": "processor_rule",
    "written_loss": "written_loss_rule",
}


def _of_known_code(cls: type[nn.Module]) -> PatchRule | None:
    """Return the rule that was written for the code of a class, or ``None``."""
    for section, module in _SECTIONS.items():
        name = known_code.known_as(cls, section)
        if name is not None:
            name = name.partition(".")[2]
            table: Any = importlib.import_module(f"{__package__}.{module}")
            rule: PatchRule = table.RULES[name](cls, patched.module_of(cls))
            object.__setattr__(rule, "copy_of", None if cls.__name__ == name else name)
            return rule
    return None


def _unknown_code(cls: type[nn.Module]) -> str | None:
    """Return why there is no rule for a class that is listed with other code, or ``None``."""
    reasons = (known_code.unknown_code(cls, section) for section in _SECTIONS)
    return next((reason for reason in reasons if reason is not None), None)


def _of_registry(cls: type[nn.Module]) -> PatchRule | None:
    """Return the rule of an attention that looks its function up in transformers' registry."""
    forward: Any = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or hasattr(cls, "config"):
        return None
    asks = {"ALL_ATTENTION_FUNCTIONS", "config", "_attn_implementation"} <= set(names_in(code))
    # One that compares the name with "sdpa" itself does something else for another name.
    if not asks or any("sdpa" in part.co_consts for part in with_inner(code)):
        return None
    attention: Any = importlib.import_module("fusedops.integrations.hf.rules.attention")
    eager = _eager_is_known(cls, forward)
    rule: PatchRule = attention.attention_rule(cls, patched.module_of(cls), eager=eager)
    return rule


def _of_experts_registry(cls: type[nn.Module]) -> PatchRule | None:
    """Return the rule of experts that look their function up in transformers' registry."""
    if "transformers.integrations.moe" not in sys.modules:
        return None
    experts: Any = importlib.import_module("fusedops.integrations.hf.rules.experts")
    if not experts.asks_registry(cls):
        return None
    loop_is_known = known_code.known_as(cls, "experts") is not None
    rule: PatchRule = experts.experts_rule(cls, patched.module_of(cls), loop_is_known=loop_is_known)
    return rule


def _eager_is_known(cls: type[nn.Module], forward: Any) -> bool:
    """Return whether the ``eager`` of an attention is that of a family with a table.

    Its caller must drop the weights: those that are asked for are then recorded by hooks. Sinks
    must be an argument, because the function of GPT-OSS reads them from the module.
    """
    eager = forward.__globals__.get("eager_attention_forward")
    recorded = (
        getattr(value, "_can_record_outputs", None) or {} for value in _classes_of(cls.__module__)
    )
    if eager is None or not any(_records(outputs.get("attentions"), cls) for outputs in recorded):
        return False
    known = known_code.known_as(eager, "eager")
    sinks = any("s_aux" in names for names in _keywords(forward))
    return known is not None and (sinks or not known.startswith("gpt_oss."))


def _classes_of(module: str) -> list[type]:
    return [value for value in vars(sys.modules[module]).values() if isinstance(value, type)]


def _records(recorded: Any, cls: type[nn.Module]) -> bool:
    """Return whether what a model records as its attentions is the output of a class."""
    targets = recorded if isinstance(recorded, list | tuple) else [recorded]
    return any(getattr(target, "target_class", target) is cls for target in targets)


def _keywords(function: Any) -> list[tuple[str, ...]]:
    """Return the names of keyword arguments in the calls of a function."""
    constants = function.__code__.co_consts
    return [constant for constant in constants if isinstance(constant, tuple)]
