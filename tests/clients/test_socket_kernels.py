"""Models that are built after ``register`` are patched models, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from socket_testing import counted, llama, results, rows
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


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


def loss(model: nn.Module) -> torch.Tensor:
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    return model(input_ids=ids, labels=ids).loss


def assert_same(model: nn.Module, patched: nn.Module) -> None:
    """The same classes, losses and gradients, bit for bit."""
    assert str(describe(model)) == str(describe(patched))
    with counted() as calls:
        found = results(model, loss)
    assert calls["cross_entropy_backward"] == 1 and calls["attention_backward"] == 2
    for name, expected in results(patched, loss).items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("build", [llama, bert])
def test_a_model_built_by_its_class_is_a_patched_one(build: type) -> None:
    patched = build()
    fusedops.patch(patched)
    kernels.register()
    assert_same(build(), patched)


@pytest.mark.parametrize("build", [llama, bert])
def test_a_loaded_model_is_a_patched_one(build: type, tmp_path: Path) -> None:
    stock = build()
    stock.save_pretrained(tmp_path)
    kernels.register()
    loaded = type(stock).from_pretrained(tmp_path).train()
    made = transformers.AutoModel.from_config(stock.config)
    kernels.unregister()
    fusedops.patch(stock)
    assert_same(loaded, stock)
    expected = transformers.AutoModel.from_config(stock.config)
    assert describe(expected).num_replaced == 0
    assert str(describe(made)) == str(fusedops.patch(expected)).replace("at level O2", "at level -")


def test_models_before_and_after_are_stock() -> None:
    before = llama()
    kernels.register()
    between = llama()
    kernels.unregister()
    after = llama()
    assert describe(before).num_replaced == describe(after).num_replaced == 0
    assert describe(between).num_replaced > 0
    fusedops.unpatch(between)
    expected = results(before, loss)
    for model in (between, after):
        for name, value in results(model, loss).items():
            assert torch.equal(value, expected[name]), name


def test_hidden_states_are_recorded_before_during_and_after() -> None:
    ids = rows(1)[0]["input_ids"][None]
    shapes = []
    for change in (None, kernels.register, kernels.unregister):
        if change is not None:
            change()
        output = llama()(input_ids=ids, output_hidden_states=True)
        shapes.append([list(hidden_state.shape) for hidden_state in output.hidden_states])
    assert shapes[0] == shapes[1] == shapes[2] == [[1, 16, 32]] * 3


def test_registering_again_changes_the_level() -> None:
    kernels.register()
    kernels.register(level="O1")
    counts = describe(llama()).counts
    assert "linear_glu" not in counts and counts["rms_norm"] > 0
    with pytest.raises(ValueError, match="level"):
        kernels.register(level="fast")
