"""Which arguments of a call a fused function knows, read from two signatures when it is registered.

A later version of a library gives a function another argument, as transformers 5.23 gave ``cache``
to ``sdpa_attention_forward``. A fused function that takes ``**kwargs`` would drop it without a
word, one that does not would raise: the original runs for such calls instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Known(NamedTuple):
    """The arguments that a fused function takes in the meaning that the original gives them."""

    positional: int  # how many, ``self`` included
    names: frozenset[str] | None  # those by keyword; ``None`` where it takes any and hands them on
    foreign: Mapping[str, Any]  # name -> default of those that only the original names


def known_arguments(fused: Callable[..., Any], original: Callable[..., Any]) -> Known:
    """Return which arguments of ``original`` the function ``fused`` knows.

    The first argument after ``self`` is known by its place, whatever its name is. A function that
    takes any arguments binds them by the original's signature.

    Args:
        fused: a function or an unbound method.
        original: what it stands for, with the same place for the first two arguments.
    """
    ours, theirs = (inspect.signature(function).parameters for function in (fused, original))
    kinds = {parameter.kind for parameter in ours.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        count = sum(parameter.kind is positional for parameter in theirs.values())
        return Known(count, None, {})
    shared = 0
    for place, (name, other) in enumerate(zip(ours, theirs, strict=False)):
        by_place = ours[name].kind is theirs[other].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if not by_place or (name != other and place > 1):
            break
        shared += 1
    foreign = {
        name: parameter.default
        for name, parameter in theirs.items()
        if parameter.kind in _NAMED and name not in ours
    }
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return Known(shared, None, foreign)
    names = frozenset(name for name in ours if ours[name].kind in _NAMED)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        shared = len(theirs)
    return Known(shared, names, foreign)


def foreign_keyword(known: Known, keywords: Mapping[str, Any]) -> str | None:
    """Return a keyword of a call that the fused function does not know, or ``None``.

    What has the value of the original's default changes nothing.

    Args:
        known: as ``known_arguments`` returned it.
        keywords: of the call.
    """
    if known.names is not None:
        return next((name for name in keywords if name not in known.names), None)
    for name, default in known.foreign.items():
        if name in keywords and keywords[name] is not default:
            return name
    return None


def read_keywords(function: Callable[..., Any]) -> dict[str, None]:
    """Return the names that ``function`` may read from its ``**kwargs``, each with ``None``.

    They are the identifiers among the strings of its code: some of them may be other strings.
    """
    code: Any = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return {}
    return {
        constant: None
        for constant in code.co_consts
        if isinstance(constant, str) and constant.isidentifier()
    }
