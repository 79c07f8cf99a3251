"""Encoder and encoder-decoder families: a patched model trains as the stock one, as configured.

What every family must do is tested in ``test_patch_families.py``. Here is what only some have.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from encoder_families import FAMILIES, IDS, MASK, SPECTRUM
from patch_testing import assert_close, assert_same_training

from fusedops.integrations import describe


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "gated T5"])
def test_t5_with_its_second_product_kept_in_float32(name: str) -> None:
    """As transformers loads T5 in half precision; the stream after it is then float32 too."""
    family = FAMILIES[name]
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    for model in (patched, stock):
        for module in model.modules():
            if hasattr(module, "wo"):
                module.wo.float()
    exact = family.logits(family.model().double())
    found, expected = family.logits(patched), family.logits(stock)
    assert found.dtype == expected.dtype
    assert (found.double() - exact).norm() <= 1.5 * (expected.double() - exact).norm()


@pytest.mark.usefixtures("own_products")
def test_whisper_in_training_calls_the_second_product_after_its_inner_dropout() -> None:
    family = FAMILIES["WhisperForConditionalGeneration"]
    patched, stock = family.pair(activation_dropout=1.0)
    assert describe(patched)["model.encoder.layers.0.fc2"].op == "linear_act"
    assert_close(family.logits(patched), family.logits(stock))
    assert describe(patched.eval())["model.encoder.layers.0.fc2"].reason.startswith("inside")


def test_whisper_in_float16_is_clamped() -> None:
    family = FAMILIES["WhisperForConditionalGeneration"]
    patched, stock = (model.eval().half() for model in family.pair())
    for model in (patched, stock):
        model.model.encoder.layers[0].fc2.bias.data.fill_(65000.0)
        model.model.encoder.layers[1].fc2.bias.data.fill_(65000.0)
    states, expected = (
        model.model.encoder(SPECTRUM.half(), output_hidden_states=True).hidden_states
        for model in (patched, stock)
    )
    assert torch.equal(states[1], expected[1])
    assert states[1].max() == 65504.0 - 1000


@pytest.mark.usefixtures("own_products")
def test_classifier_with_pooler() -> None:
    bert = replace(FAMILIES["BertForMaskedLM"], cls="BertForSequenceClassification")
    patched, stock = bert.pair()
    labels = torch.tensor([0, 1])
    assert_same_training(
        patched, stock, lambda model: model(IDS, attention_mask=MASK, labels=labels).loss
    )
    assert describe(patched)["bert.pooler.dense"].op == "linear_act"
    assert not describe(patched)["bert.pooler.activation"].replaced
