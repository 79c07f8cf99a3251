"""Models that are built after ``register`` are patched models, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from causal_families import DENSE, IDS, Family
from encoder_families import FAMILIES
from patch_testing import counted, gradients
from torch import nn

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from fusedops.integrations import kernels


@pytest.fixture(autouse=True)
def undo() -> Iterator[None]:
    stock = transformers.PreTrainedModel.post_init
    yield
    kernels.unregister()
    assert transformers.PreTrainedModel.post_init is stock


LLAMA, BERT = DENSE["Llama"], FAMILIES["BertForMaskedLM"]
each_family = pytest.mark.parametrize("family", [LLAMA, BERT], ids=["Llama", "BERT"])


def assert_same(model: nn.Module, patched: nn.Module, family: Family) -> None:
    """The same classes, losses and gradients, bit for bit."""
    assert str(describe(model)) == str(describe(patched))
    with counted() as calls:
        found = gradients(model, family.loss)
    assert calls["cross_entropy_backward"] == 1 and calls["attention_backward"] == 2
    for name, expected in gradients(patched, family.loss).items():
        assert torch.equal(found[name], expected), name


@each_family
def test_a_model_built_by_its_class_is_a_patched_one(family: Family) -> None:
    patched = family.model()
    fusedops.patch(patched)
    kernels.register()
    assert_same(family.model(), patched, family)


@each_family
def test_a_loaded_model_is_a_patched_one(family: Family, tmp_path: Path) -> None:
    stock = family.model()
    stock.save_pretrained(tmp_path)
    kernels.register()
    loaded = type(stock).from_pretrained(tmp_path).train()
    made = transformers.AutoModel.from_config(stock.config)
    kernels.unregister()
    fusedops.patch(stock)
    assert_same(loaded, stock, family)
    expected = transformers.AutoModel.from_config(stock.config)
    assert describe(expected).num_replaced == 0
    assert str(describe(made)) == str(fusedops.patch(expected)).replace("at level O2", "at level -")


def test_models_before_and_after_are_stock() -> None:
    before = LLAMA.model()
    kernels.register()
    between = LLAMA.model()
    kernels.unregister()
    after = LLAMA.model()
    assert describe(before).num_replaced == describe(after).num_replaced == 0
    assert describe(between).num_replaced > 0
    fusedops.unpatch(between)
    expected = gradients(before, LLAMA.loss)
    for model in (between, after):
        for name, value in gradients(model, LLAMA.loss).items():
            assert torch.equal(value, expected[name]), name


def test_hidden_states_are_recorded_before_during_and_after() -> None:
    shapes = []
    for change in (None, kernels.register, kernels.unregister):
        if change is not None:
            change()
        output = LLAMA.model()(input_ids=IDS, output_hidden_states=True)
        shapes.append([list(hidden_state.shape) for hidden_state in output.hidden_states])
    assert shapes[0] == shapes[1] == shapes[2] == [[2, 12, 32]] * 3


def test_registering_again_changes_the_level() -> None:
    kernels.register()
    kernels.register(level="O1")
    counts = describe(LLAMA.model()).counts
    assert "linear_glu" not in counts and counts["rms_norm"] > 0
    with pytest.raises(ValueError, match="level"):
        kernels.register(level="fast")
