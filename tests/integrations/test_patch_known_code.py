"""Fused forwards serve the code that they were written for, with its names of arguments."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from patch_testing import rules_of
from transformers.models.granite import modeling_granite

from fusedops.integrations.hf import known_code, tables
from fusedops.integrations.hf.known_code import code, digest, known_digests
from fusedops.integrations.hf.rules.residual_norm import layer_rule
from fusedops.integrations.hf.tables import _SECTIONS

FILE = """
import torch
from torch import nn

def scaled(x{annotation}):
    return {scale} * x

class Layer(nn.Module):
    def forward(self, x{annotation}, y=1):
        {docstring}
        return self.inner(x) + y

    def inner(self, x):
        return scaled(x)
"""
PLAIN = {"annotation": "", "scale": "2", "docstring": "pass"}


def layer_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **differences: str) -> Any:
    name = f"known_code_{'_'.join(differences) or 'plain'}"
    (folder / f"{name}.py").write_text(FILE.format(**PLAIN | differences))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name).Layer


def test_a_digest_is_of_all_that_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = layer_of(tmp_path, monkeypatch, docstring='"A sentence."')
    same = layer_of(tmp_path, monkeypatch, annotation=": torch.Tensor", docstring='"Another."')
    other = layer_of(tmp_path, monkeypatch, scale="3", docstring='"A sentence."')
    assert digest(plain) == digest(same) != digest(other)
    assert digest(plain.inner) != digest(plain)
    assert code(plain).count("def ") == 3


def test_what_is_listed_is_in_this_transformers() -> None:
    for section in _SECTIONS:
        for rule, name in zip(rules_of(section), known_digests()[section], strict=True):
            assert known_code.known_as(rule.original, section) == name


def test_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = modeling_granite.GraniteDecoderLayer
    listed = known_digests() | {"t5": {"granite.GraniteDecoderLayer": {"0123456789ab": "5.0"}}}
    monkeypatch.setattr(known_code, "known_digests", lambda: listed)
    assert tables._made(layer) == (
        "this transformers has another GraniteDecoderLayer: the digest of its code is "
        f"{digest(layer)}, known are 0123456789ab"
    )


def test_code_without_source_has_no_digest() -> None:
    namespace: dict[str, Any] = {"nn": nn, "__name__": "transformers.nowhere"}
    exec("class Layer(nn.Module):\n    def forward(self, x): return x", namespace)
    assert digest(namespace["Layer"]) is None


def _accepts_the_former_name(forward: Any) -> Any:
    """Stand for ``deprecate_kwarg`` of transformers, which a class of this file cannot have."""

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(self, *args, **kwargs)

    return renamed


class _Later(nn.Module):
    """A layer of a release in which ``past_key_values`` is ``cache``."""

    @_accepts_the_former_name
    def forward(self, hidden_states: Any, mask: Any = None, cache: Any = None, **kw: Any) -> Any:
        return "original", (mask, cache, kw)


def _compute(self: Any, hidden_states: Any, **options: Any) -> Any:
    return "fused", options


def test_arguments_have_the_names_of_the_original() -> None:
    layer: Any = layer_rule(_Later, compute=_compute).patched()
    x = torch.ones(2)
    assert layer(x, cache="c", more=1) == ("fused", {"mask": None, "cache": "c", "more": 1})
    assert layer(x, "m", "c") == ("fused", {"mask": "m", "cache": "c"})
    assert layer(hidden_states=x, mask="m") == ("fused", {"mask": "m", "cache": None})
    assert layer(x, past_key_values="c") == ("original", (None, "c", {}))
    with pytest.raises(TypeError):
        layer(x, "m", "c", "one too many")
