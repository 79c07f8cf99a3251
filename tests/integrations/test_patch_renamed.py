"""An argument that transformers renamed: fused forwards take the name that is there.

From 5.24 on ``past_key_values`` is ``cache``. The classes here have the later name, whatever
transformers is installed.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

from fusedops.integrations.hf.renamed_arguments import renames
from fusedops.integrations.hf.rules import residual_norm
from fusedops.integrations.hf.rules.rule import subclass
from fusedops.integrations.hf.signatures import known_arguments

renamed = deprecate_kwarg("past_key_values", "99.0.0", new_name="cache")


class _Attention(nn.Module):
    @renamed
    def forward(self, q: Any, k: Any, cos: Any, sin: Any, cache: Any = None, **kwargs: Any) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, cache, kwargs


class _Later(nn.Module):
    """A layer of a later transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Attention()

    @renamed
    def forward(self, hidden_states: Any, mask: Any = None, cache: Any = None, **kw: Any) -> Any:
        return "original", mask, cache, kw


class _Fused(nn.Module):
    """Its fused forward, with the name that it had before."""

    def forward(
        self: Any, hidden_states: Any, mask: Any = None, past_key_values: Any = None, **kw: Any
    ) -> Any:
        if mask == "original":
            return super().forward(hidden_states, mask, past_key_values, **kw)
        options = dict(mask=mask, past_key_values=past_key_values, **kw)
        return self.inner(*hidden_states, past_key_values=past_key_values), options


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that patched classes may be put into."""
    name = f"{__name__}_home"
    module = ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    monkeypatch.setitem(sys.modules, name, module)
    return name


def _rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 8, 16), (2, 2, 8, 16), (1, 8, 16), (1, 8, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_the_fused_forward_takes_and_hands_on_the_new_name(home: str) -> None:
    assert residual_norm.unknown_forward(_Fused, _Later) is None
    patched: Any = subclass(_Later, _Fused, home)
    assert list(inspect.signature(patched.forward).parameters) == [
        *("self", "hidden_states", "mask", "cache", "kw")
    ]
    layer = patched()
    with warnings.catch_warnings(action="error"):  # which the old name would give
        (*_, cache, rest), options = layer(_rows(), cache="a cache")
    assert (cache, rest) == ("a cache", {}), "the child got it by its new name"
    assert options == {"mask": None, "cache": "a cache"}
    assert layer(_rows(), None, "by place")[1]["cache"] == "by place"
    assert layer(_rows(), "original", "a cache") == ("original", "original", "a cache", {})
    assert "past_key_values" in inspect.signature(_Fused.forward).parameters, "left as it was"


def test_names_that_fit_are_left() -> None:
    assert renames(_Later.forward, _Later.forward) == {}
    assert renames(_Fused.forward, _Fused.forward) == {}
    assert residual_norm.unknown_forward(_Later, _Fused) is not None, "only old names are known"


def test_the_new_name_is_known_by_place_and_by_keyword(home: str) -> None:
    patched: Any = subclass(_Later, _Fused, home)
    known = known_arguments(patched.forward, _Later.forward)
    assert known.positional == 4 and not known.foreign, "foreign ones run the original"
