"""Families without a table: their classes take the rules of those that they copy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_families import GROUPED, IDS, SIZES, loss
from families import build
from patch_testing import assert_close, assert_same_training, counted, gradients
from torch import nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert

import fusedops
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.rule import FusionPlan

HEADS = GROUPED | {"head_dim": 8}
# Family -> its configuration, and how often ops run in a step of two layers.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Granite": (GROUPED, {"attention": 2, "rotary_embedding": 2, "rms_norm": 5, "linear_glu": 2}),
    "SmolLM3": (GROUPED, {"attention": 2, "rms_norm": 3, "add_rms_norm": 2, "linear_glu": 2}),
    "Olmo2": (GROUPED, {"attention": 2, "rms_norm": 9, "linear_glu": 2}),
    "Glm4": (HEADS, {"attention": 2, "rms_norm": 9, "swiglu": 2}),
    "Ministral": (HEADS, {"attention": 2, "rms_norm": 3, "add_rms_norm": 2, "linear_glu": 2}),
    "Gemma3": (HEADS, {"attention": 2, "rms_norm": 11, "add_rms_norm": 2, "linear_glu": 2}),
    "HunYuanDenseV1": (HEADS, {"attention": 2, "rotary_embedding": 2, "linear_glu": 2}),
    "StableLm": (GROUPED, {"attention": 2, "layer_norm": 5, "linear_glu": 2}),
}
# Family -> classes of it that are copies of others.
COPIES = {
    "SmolLM3": {"SmolLM3DecoderLayer"},
    "Ministral": {"MinistralDecoderLayer"},
    "Gemma3": {"Gemma3DecoderLayer"},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
of_each_family = pytest.mark.parametrize("name", FAMILIES)

# The same of families whose layers are known by their code.
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
BY_CODE: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Cohere": ({}, {"attention": 2, "layer_norm": 3, "linear_glu": 2}),
    "GPTJ": (GPT | {"rotary_dim": 8}, {"layer_norm": 3, "mlp": 2}),
    "Helium": (HEADS, {"attention": 2, "rms_norm": 3, "add_rms_norm": 2, "linear_glu": 2}),
    "Mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4}, {"layer_norm": 5, "mlp": 2}),
    "NanoChat": (GROUPED, {"attention": 2, "rms_norm": 10, "mlp": 2}),
    "Olmo": ({}, {"attention": 2, "layer_norm": 5, "linear_glu": 2}),
    "SeedOss": (HEADS | NO_DROPOUT, {"attention": 2, "add_rms_norm": 2, "linear_glu": 2}),
    "Starcoder2": (GROUPED, {"attention": 2, "layer_norm": 3, "add_layer_norm": 2, "mlp": 2}),
}
ALL = FAMILIES | BY_CODE


def _model(name: str) -> nn.Module:
    config = CONFIGS.get(name, f"{name}Config")
    options = SIZES | ALL[name][0]
    return build(f"{name}ForCausalLM", config, options, seed=0, varied=("norm",))


def _pair(name: str) -> tuple[nn.Module, nn.Module]:
    stock = _model(name)
    patched = copy.deepcopy(stock)
    fusedops.patch(patched)
    return patched, stock


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ALL)
def test_training_matches_stock(name: str, autocast: bool) -> None:
    patched, stock = _pair(name)
    # The gradient of a key's bias is a difference of large numbers: of one draw it says little.
    assert_same_training(patched, stock, loss, autocast=autocast, draws=4 if autocast else 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("own_products")
def test_ops_run_and_the_report_names_what_is_copied(name: str) -> None:
    model = _model(name)
    report = fusedops.patch(model)
    with counted() as calls:
        loss(model)
    expected = ALL[name][1] | {"cross_entropy": 1}
    assert {op: calls[op] for op in expected} == expected
    if name in BY_CODE:
        return
    copies = {entry.cls for entry in report.replaced if entry.reason.startswith("as ")}
    assert copies >= COPIES.get(name, set())


@of_each_family
def test_padding_and_unpatch(name: str) -> None:
    patched, stock = _pair(name)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    found, expected = (model.eval()(IDS, attention_mask=mask).logits for model in (patched, stock))
    assert_close(found[mask.bool()], expected[mask.bool()])
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(module) for module in stock.modules()
    ]
    before, after = gradients(stock.train(), loss), gradients(patched.train(), loss)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["Granite", "Gemma3"])
def test_an_eager_attention_that_is_known_is_fused_until_its_weights_are_recorded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES[name][0], "attn_implementation", "eager")
    patched, stock = _pair(name)
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert calls["attention"] == 2
    with counted() as calls:
        found, expected = (
            model.eval()(IDS, output_attentions=True).attentions for model in (patched, stock)
        )
    assert calls["attention"] == 0
    for weights, wanted in zip(found, expected, strict=True):
        assert_close(weights, wanted)


@pytest.mark.ci
def test_a_patched_copy_loads_in_another_process(tmp_path: Path) -> None:
    patched, _ = _pair("Granite")
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps(patched))
    code = f"""
import pickle, torch
model = pickle.loads(open({str(file)!r}, "rb").read())
ids = torch.arange(24).view(2, 12)
print(type(model.model.norm).__module__, model(ids, labels=ids).loss.item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, value = done.stdout.split()
    assert module == "fusedops.integrations.hf.patched.transformers.models.granite.modeling_granite"
    ids = torch.arange(24).view(2, 12)
    assert float(value) == patched(ids, labels=ids).loss.item()


def test_a_module_of_patched_classes_has_no_others() -> None:
    from fusedops.integrations.hf.patched.transformers.models.granite import (
        modeling_granite as module,
    )

    assert module.GraniteMLP.__name__ == "GraniteMLP"
    for name in ("GraniteForCausalLM", "nothing", "torch"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import fusedops.integrations.hf.patched.no_such_package as missing

        missing.Anything  # noqa: B018


class OwnOutput(nn.Module):
    """A copy of the end of BERT's attention in a file of the user's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        first = modeling_bert.BertSelfOutput(config)
        self.dense, self.dropout, self.LayerNorm = first.dense, first.dropout, first.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class OtherOutput(OwnOutput):
    """The same with one token changed."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states - input_tensor)
        return hidden_states


def test_a_home_made_copy_is_taken_and_a_near_copy_is_not() -> None:
    rule = tables.rule_of_class(OwnOutput)
    assert rule is not None and rule.copy_of == "BertSelfOutput"
    other = tables.rule_of_class(OtherOutput)
    assert other is None or not isinstance(other.plan(OtherOutput(BertConfig())), FusionPlan)


def test_a_class_that_cannot_be_imported_is_not_taken() -> None:
    class Local(OwnOutput):
        pass

    assert tables.rule_of_class(Local) is None


def test_a_copy_that_is_replaced_later_runs_its_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched, _ = _pair("Granite")
    from transformers.models.granite import modeling_granite

    called = []
    original = modeling_granite.GraniteMLP.forward

    def replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
        called.append(self)
        return original(self, x)

    monkeypatch.setattr(modeling_granite.GraniteMLP, "forward", replaced)
    loss(patched)
    assert len(called) == 2
    assert "GraniteMLP.forward was replaced" in str(fusedops.describe(patched))
