"""What only some model types have: options, dtypes and modules of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from causal_families import DENSE, IDS, loss
from encoder_families import FAMILIES, MASK, SPECTRUM
from encoder_families import IDS as TOKENS
from patch_testing import Adapted, assert_close, assert_same_training, counted
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe

EAGER = {"attn_implementation": "eager"}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "mish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_gated_mlp_variants(name: str, bias: bool, activation: str) -> None:
    patched, stock = DENSE[name].pair(hidden_act=activation, mlp_bias=bias)
    assert_same_training(patched, stock, loss)


def test_gemma2_caps_the_scores_as_it_is_configured_to() -> None:
    patched, stock = DENSE["Gemma2"].pair(attn_logit_softcapping=0.1, **EAGER)
    assert_same_training(patched, stock, loss)
    capped, free = (DENSE["Gemma2"].model(attn_logit_softcapping=cap) for cap in (0.1, None))
    if capped._supports_sdpa:  # which ignores the cap; transformers 5.23 no longer allows it
        assert torch.equal(capped(IDS).logits, free(IDS).logits)
    for model in (capped, free):
        model.set_attn_implementation("eager")
        fusedops.patch(model)
    assert not torch.equal(capped(IDS).logits, free(IDS).logits)


def test_float64_is_normalised_in_float32_as_the_models_do() -> None:
    patched, stock = (model.double() for model in DENSE["Llama"].pair())
    with counted() as calls:
        found = patched(IDS).logits
    assert (calls["rms_norm"], calls["attention"]) == (0, 2)
    expected = stock(IDS).logits
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=64)
    assert ((found - expected).abs() <= budget).all()


def test_static_cache_and_packed_sequences() -> None:
    patched, stock = (model.eval() for model in DENSE["Mistral"].pair())
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    tokens, wanted = (model.generate(IDS, **options) for model in (patched, stock))
    assert torch.equal(tokens, wanted)
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    assert_close(*(model(IDS, position_ids=packed).logits for model in (patched, stock)))


@pytest.mark.usefixtures("own_products")
def test_opt_calls_the_feed_forward_children_that_have_hooks() -> None:
    patched, stock = DENSE["OPT"].pair()
    shapes: dict[nn.Module, torch.Size] = {}
    for model in (patched, stock):
        model.model.decoder.layers[0].fc1.register_forward_hook(
            lambda module, args, output, model=model: shapes.__setitem__(model, output.shape)
        )
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert (calls["mlp"], calls["add_layer_norm"]) == (1, 2)
    assert shapes[patched] == shapes[stock]
    report = describe(patched)
    assert report["model.decoder.layers.0"].reason == "without mlp: fc1 has hooks"
    assert report["model.decoder.layers.0.fc2"].op == "linear_act"
    assert report["model.decoder.layers.1.fc2"].reason == "inside model.decoder.layers.1"


@pytest.mark.usefixtures("own_products")
def test_adapted_projections_are_called_and_the_gate_is_still_one_op() -> None:
    patched, stock = DENSE["Llama"].pair()
    for model in (patched, stock):
        mlp = model.model.layers[0].mlp
        mlp.gate_proj = Adapted(mlp.gate_proj, 48)
    with counted() as calls:
        loss(patched)
    assert (calls["swiglu"], calls["linear_glu"]) == (1, 1)
    assert_same_training(patched, stock, loss)
    report = describe(patched)
    assert "gate_proj is a Adapted" in report["model.layers.0.mlp"].reason
    assert report["model.layers.0.mlp.up_proj"].op == "linear_act"
    assert report["model.layers.0.mlp.act_fn"].reason == "inside model.layers.0.mlp"


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


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "gated T5"])
def test_dropout_of_t5_sublayers_drops_all_branches(name: str) -> None:
    """Alone: one option has the dropouts of attention and feed-forward layers in it as well."""
    family = FAMILIES[name]
    patched, stock = family.pair(dropout_rate=1.0)
    for model in (patched, stock):
        for path, module in model.named_modules():
            is_layer = path.split(".")[-2:-1] in (["0"], ["1"], ["2"])
            if isinstance(module, nn.Dropout) and not is_layer:
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    assert_close(family.logits(patched), family.logits(stock))


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
        patched, stock, lambda model: model(TOKENS, attention_mask=MASK, labels=labels).loss
    )
    assert describe(patched)["bert.pooler.dense"].op == "linear_act"
    assert not describe(patched)["bert.pooler.activation"].replaced
