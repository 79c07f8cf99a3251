"""A keyword that the original knows and the fused function does not runs the original."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patch_testing import TABLES, rules_of
from torch import nn

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.rules.rule import PatchRule, always

pytest.importorskip("transformers")

from fusedops.integrations.hf.rules import attention, experts, losses

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Calls = list[tuple[Any, ...]]


@pytest.mark.parametrize("table", TABLES)
def test_every_keyword_is_known_or_runs_the_original(
    monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    for rule in rules_of(table):
        for name in rule.methods if rule.watched.attributes else ():
            with monkeypatch.context() as patches:
                _assert_keywords_are_known(patches, rule, name)


def _assert_keywords_are_known(monkeypatch: pytest.MonkeyPatch, rule: PatchRule, name: str) -> None:
    theirs = inspect.signature(getattr(rule.original, name)).parameters
    ours = inspect.signature(getattr(rule.patched, name)).parameters
    if any(row.kind is inspect.Parameter.VAR_POSITIONAL for row in ours.values()):
        return  # binds all by the signature of the original
    instance, called = _instance_of(monkeypatch, rule, name)
    named = [other for other in theirs if theirs[other].kind in NAMED][1:]
    foreign = [each for each in named if each not in ours]
    if not any(row.kind is inspect.Parameter.VAR_KEYWORD for row in ours.values()):
        foreign.append("of_a_later_version")
    for keyword in foreign:
        getattr(instance, name)(**{keyword: torch.zeros(2, 4)})
    assert len(called) == len(foreign)
    if not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in theirs.values()):
        getattr(instance, name)(*[torch.zeros(2, 4)] * len(theirs), "further")
        assert len(called) == len(foreign) + 1


def _instance_of(monkeypatch: pytest.MonkeyPatch, rule: Any, name: str) -> tuple[nn.Module, Calls]:
    """Return a bare patched instance, and where the calls of the original's method are noted."""
    instance, called = rule.patched.__new__(rule.patched), []
    nn.Module.__init__(instance)

    def original(*args: Any, **kwargs: Any) -> None:
        called.append((args, kwargs))

    # What the rule watches stays: a replaced method would run the original anyway.
    monkeypatch.setattr("fusedops.integrations.hf.rules.rule.changed", lambda watched, module: None)
    monkeypatch.setattr(rule.original, name, original)
    return instance, called


def _rule(original: type[nn.Module], forward: Callable[..., Any]) -> PatchRule:
    patched = type(original.__name__, (original,), {"forward": forward})
    return PatchRule(original, patched, "O1", always("gelu"))


class Later(nn.Module):
    """A class that a later version has given two more arguments."""

    def forward(self, x: Any, y: Any = None, *, cache: Any = None, scale: float = 1.0) -> Any:
        return "original", x, y, cache, scale


@pytest.mark.parametrize("hands_on", [False, True])
def test_a_rule_of_a_later_original(hands_on: bool) -> None:
    def closed(self: Any, x: Any) -> Any:
        return "fused", x

    def hands_further_keywords_on(self: Any, x: Any, **kwargs: Any) -> Any:
        return "fused", x

    module = Later()
    rule = _rule(Later, hands_further_keywords_on if hands_on else closed)
    module.__class__ = rule.patched
    call: Any = module
    assert call(1) == call(x=1) == ("fused", 1)
    assert call(1, 2) == ("original", 1, 2, None, 1.0)
    assert call(1, cache=3) == ("original", 1, None, 3, 1.0)
    assert call(1, scale=2.0)[0] == "original"
    assert call(1, cache=None)[0] == "original"


def _sdpa_with_cache(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
    return "sdpa", cache, kwargs


def test_attention_hands_what_only_sdpa_knows_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``cache`` of transformers 5.23, which ``sdpa`` must update."""
    known = attention._further_arguments(_sdpa_with_cache, attention.attend)
    monkeypatch.setattr(attention, "_SDPA_ARGUMENTS", known)
    monkeypatch.setattr(attention, "sdpa_attention_forward", _sdpa_with_cache)
    heads = torch.randn(1, 2, 3, 8)
    call: Any = attention.attend_as_sdpa
    module = SimpleNamespace(is_causal=True)
    name, cache, options = call(module, heads, heads, heads, None, scaling=0.5, cache="paged")
    assert (name, cache, options["scaling"]) == ("sdpa", "paged", 0.5)
    output, _ = call(module, heads, heads, heads, None, cache=None)
    assert output.shape == (1, 3, 2, 8)
    with pytest.raises(UnsupportedError, match="cache is an argument of transformers' sdpa"):
        attention.attend(module, heads, heads, heads, None, cache="paged")


def test_attention_knows_the_installed_sdpa() -> None:
    """All that this transformers' ``sdpa`` names is known, or is a keyword that leads to it."""
    theirs = inspect.signature(attention.sdpa_attention_forward).parameters
    ours = inspect.signature(attention.attend).parameters
    unknown = {name for name in theirs if name not in ours}
    assert unknown == set(attention._SDPA_ARGUMENTS) | (unknown & {"args", "kwargs"})


def _eager_with_cache(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, dropout: Any, cache: Any
) -> Any:
    return "eager", scaling, dropout, cache


def test_eager_attention_hands_what_only_the_original_knows_to_it() -> None:
    namespace = globals() | {"eager_attention_forward": _eager_with_cache}
    sys.modules[__name__].eager_attention_forward = _eager_with_cache  # type: ignore[attr-defined]
    interface = attention.FusedInterface(namespace, eager=True)
    module, heads = nn.Module().eval(), torch.randn(1, 2, 3, 8)
    found = interface.attend_as_eager(module, heads, heads, heads, None, 0.5, cache="paged")
    assert found == ("eager", 0.5, 0.0, "paged")
    assert interface.attend_as_eager(module, heads, heads, heads, None, 0.5)[1] is None


def test_functions_of_registries_know_every_keyword() -> None:
    """Experts and losses have the signatures of those that they stand for."""
    theirs = inspect.signature(experts.moe.grouped_mm_experts_forward).parameters
    assert list(theirs)[1:] == list(inspect.signature(experts.experts_forward).parameters)[1:-1]
    for known in losses._LOSSES:
        assert not attention._further_arguments(known.stock, known.fused)
