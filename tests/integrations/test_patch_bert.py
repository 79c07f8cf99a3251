"""BERT: a patched model trains as the stock one, whatever hangs on its modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from encoder_families import FAMILIES, IDS, MASK
from patch_testing import assert_close, assert_same_training, counted, gradients
from transformers.models.bert import modeling_bert

import fusedops
from fusedops.integrations import describe

BERT = FAMILIES["BertForMaskedLM"]
loss, logits = BERT.loss, BERT.logits


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_training_matches_stock(level: str, autocast: bool) -> None:
    stock = BERT.model()
    patched = copy.deepcopy(stock)
    fusedops.patch(patched, level=level)
    assert_same_training(patched, stock, loss, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "relu", "silu"])
@pytest.mark.usefixtures("own_products")
def test_every_known_activation(activation: str, autocast: bool) -> None:
    patched, stock = BERT.pair(hidden_act=activation)
    entries = describe(patched)
    assert entries["bert.encoder.layer.0.intermediate"].op == "linear_act"
    assert entries["cls.predictions.transform"].op == "linear_act"
    if autocast and activation == "relu":
        pytest.skip("its slope jumps: whichever way bfloat16 rounds an argument near 0 is right")
    assert_same_training(patched, stock, loss, autocast=autocast)


def test_unknown_activation_is_kept_and_reported() -> None:
    stock = BERT.model(hidden_act="mish")
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    assert "Mish" in report["bert.encoder.layer.0.intermediate"].reason
    assert type(patched.cls.predictions.transform) is modeling_bert.BertPredictionHeadTransform
    with pytest.raises(fusedops.UnsupportedError, match="3 modules could not be replaced"):
        fusedops.patch(patched, strict=True)
    assert_same_training(patched, stock, loss)


@pytest.mark.usefixtures("own_products")
def test_which_ops_run() -> None:
    patched, _ = BERT.pair()
    with counted() as calls:
        loss(patched).backward()
    expected = {
        "attention": 2,
        "layer_norm": 2,
        "add_layer_norm": 4,
        "linear_act": 2 * 6 + 2,
        "cross_entropy": 1,
    }
    assert calls == expected | {f"{op}_backward": count for op, count in expected.items()}


@pytest.mark.usefixtures("own_products")
def test_classifier_with_pooler() -> None:
    patched, stock = replace(BERT, name="BertForSequenceClassification").pair()
    labels = torch.tensor([0, 1])
    assert_same_training(
        patched, stock, lambda model: model(IDS, attention_mask=MASK, labels=labels).loss
    )
    assert describe(patched)["bert.pooler.dense"].op == "linear_act"
    assert not describe(patched)["bert.pooler.activation"].replaced


def test_unpatch_restores_to_the_bit() -> None:
    patched, stock = BERT.pair()
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [
        type(module) for module in stock.modules()
    ]
    before, after = gradients(stock, loss), gradients(patched, loss)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_dict_goes_both_ways() -> None:
    patched, stock = BERT.pair()
    assert list(patched.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(patched.state_dict())
    patched.load_state_dict(stock.state_dict())
    assert patched.cls.predictions.decoder.weight is patched.bert.embeddings.word_embeddings.weight
    assert_close(logits(patched), logits(stock))


@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.0.intermediate.dense",
        "bert.encoder.layer.0.intermediate.intermediate_act_fn",
        "bert.encoder.layer.0.output.dense",
        "bert.encoder.layer.0.output.LayerNorm",
        "bert.encoder.layer.1.attention.output.dropout",
        "cls.predictions.transform.dense",
    ],
)
def test_a_hook_may_change_what_a_bypassed_child_returns(name: str) -> None:
    patched, stock = BERT.pair()
    for model in (patched, stock):
        model.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
    assert_close(logits(patched), logits(stock))


def test_dropout_of_everything_leaves_the_residual_stream() -> None:
    patched, stock = BERT.pair(hidden_dropout_prob=1.0)
    for model in (patched, stock):
        model.bert.embeddings.dropout.p = 0.0
    with counted() as calls:
        assert_close(logits(patched), logits(stock))
    assert calls["add_layer_norm"] == 4


def test_dropout_in_training_and_none_in_evaluation() -> None:
    patched, stock = BERT.pair(hidden_dropout_prob=0.5)
    first, again = gradients(patched, loss), gradients(patched, loss)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(loss(patched), loss(patched))
    assert_close(logits(patched.eval()), logits(stock.eval()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_repeats_the_dropout(use_reentrant: bool) -> None:
    patched, _ = BERT.pair(hidden_dropout_prob=0.5)
    whole = gradients(patched, loss)
    patched.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        patched.enable_input_require_grads()
    recomputed = gradients(patched, loss)
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


def test_compiles_into_one_graph() -> None:
    patched, stock = BERT.pair()
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    actual = compiled(IDS).logits
    expected = stock(IDS).logits
    assert_close(actual, expected)
    actual.square().mean().backward()
    expected.square().mean().backward()
    for parameter, other in zip(patched.parameters(), stock.parameters(), strict=True):
        if other.grad is not None:
            assert_close(parameter.grad, other.grad)
