"""Fused forwards serve the code that they were written for, with its names of arguments."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from causal_families import DENSE

import fusedops
from fusedops.integrations.hf import known_code, tables
from fusedops.integrations.hf.families import FAMILIES
from fusedops.integrations.hf.known_code import code, digest, known_digests
from fusedops.integrations.hf.rules.residual_norm import layer_rule

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


def test_all_classes_of_the_tables_are_those_that_were_read() -> None:
    listed = {(module, name) for module, names in known_digests().items() for name in names}
    for rule in (rule for name in FAMILIES for rule in tables._rules_of_family(name)):
        module, name = rule.original.__module__.partition(".")[2], rule.original.__name__
        # These ask a registry of transformers for what they compute.
        assert (module, name) in listed or name.endswith(("Attention", "Experts")), name
    for module, name in listed:
        original = getattr(__import__(f"transformers.{module}", fromlist=[name]), name)
        assert known_code.unknown_code(original) is None


def test_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"models.llama.modeling_llama": {"LlamaDecoderLayer": {"0123456789ab": "5.0"}}}
    monkeypatch.setattr(known_code, "known_digests", lambda: known)
    tables._rules_of_family.cache_clear()
    try:
        model = DENSE["Llama"].model()
        report = fusedops.patch(model)
        layer = type(model.model.layers[0])
        assert report["model.layers.0"].reason == (
            "this transformers has another LlamaDecoderLayer.forward: digest "
            f"{digest(layer)}, known: 0123456789ab"
        )
        assert report["model.layers.0.mlp"].replaced
        with pytest.raises(fusedops.UnsupportedError, match="another LlamaDecoderLayer.forward"):
            fusedops.patch(DENSE["Llama"].model(), strict=True)
    finally:
        tables._rules_of_family.cache_clear()


def test_code_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {"nn": nn, "__name__": "transformers.nowhere"}
    exec("class Layer(nn.Module):\n    def forward(self, x): return x", namespace)
    assert known_code.unknown_code(namespace["Layer"]) == (
        "the source of Layer.forward is not there to be compared"
    )


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


def test_arguments_have_the_names_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("later_layers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(known_code, "unknown_code", lambda of: None)
    layer: Any = layer_rule(_Later, module.__name__, _compute).patched()
    x = torch.ones(2)
    assert layer(x, cache="c", more=1) == ("fused", {"mask": None, "cache": "c", "more": 1})
    assert layer(x, "m", "c") == ("fused", {"mask": "m", "cache": "c"})
    assert layer(hidden_states=x, mask="m") == ("fused", {"mask": "m", "cache": None})
    assert layer(x, past_key_values="c") == ("original", (None, "c", {}))
    with pytest.raises(TypeError):
        layer(x, "m", "c", "one too many")
