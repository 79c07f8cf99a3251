"""Encoder and encoder-decoder families: a patched model trains as the stock one, as configured.

What patching is at all (hooks, adapters, pickling, levels) is tested with GPT-2 and BERT. Here is
what every family must do, and what only some have.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from patch_testing import assert_close, assert_same_training, counted, gradients
from torch import nn

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

import transformers

IDS = torch.arange(2, 2 * 12 + 2).mul(7).remainder(97).view(2, 12)
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
BERT_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
PIXELS = torch.sin(torch.arange(2.0 * 3 * 16 * 16)).view(2, 3, 16, 16)
SPECTRUM = torch.sin(torch.arange(2.0 * 8 * 32)).view(2, 8, 32)
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def masked(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a masked language model."""
    return {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


@dataclass(frozen=True)
class Family:
    """A model in a size that runs in milliseconds.

    Attributes:
        name: of the model's class.
        config: of its configuration's class.
        options: of the configuration.
        ops: how often each op runs in a step of training without checkpointing.
        fused: modules of which a fused op does the work at level O2, with the ops.
        inputs: the arguments of the model, labels included.
        valid: takes from the logits those that are not of padding.
        logits_name: of the model's output.
        objective: the loss, from the model's output.
        dropout: the options that are probabilities of dropout.
        smooth: options without ReLU, for half precision: its slope jumps, and whichever way an
            argument near 0 is rounded is right.
        label: of the tests, where it is not ``name``.
    """

    name: str
    config: str
    options: dict[str, Any]
    ops: dict[str, int]
    fused: dict[str, str]
    inputs: Callable[[nn.Module], dict[str, torch.Tensor]] = masked
    valid: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda logits: logits[MASK > 0])
    logits_name: str = "logits"
    objective: Callable[[Any], torch.Tensor] = field(default=lambda output: output.loss)
    dropout: tuple[str, ...] = DROPOUT
    smooth: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def model(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.options | options))
        model = getattr(transformers, self.name)(config).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name.lower():  # ones and zeros hide which norm a weight was for
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        stock = self.model(**options)
        patched = copy.deepcopy(stock)
        fusedops.patch(patched)
        return patched, stock

    def loss(self, model: nn.Module) -> torch.Tensor:
        return self.objective(model(**self.inputs(model)))

    def logits(self, model: nn.Module) -> torch.Tensor:
        return self.valid(getattr(model(**self.inputs(model)), self.logits_name))


def bert_like(prefix: str, *, base: str, head: str, norms: int = 2) -> Family:
    """Return a family whose modules are BERT's; ``head`` is the layer before the projection."""
    layer = f"{base}.encoder.layer.1"
    return Family(
        f"{prefix}ForMaskedLM",
        f"{prefix}Config",
        BERT_SIZES | {"embedding_size": 32} if prefix == "Electra" else BERT_SIZES,
        {"cross_entropy": 1, "attention": 2, "add_layer_norm": 4, "layer_norm": norms},
        {
            f"{layer}.attention.self": "attention",
            f"{layer}.attention.output": "add_layer_norm",
            f"{layer}.intermediate": "linear_act",
            f"{layer}.output": "add_layer_norm",
            head: "linear_act",
            "": "cross_entropy",
        },
    )


DISTILBERT = Family(
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    {
        "vocab_size": 97,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 40,
        "initializer_range": 0.2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    {
        "cross_entropy": 1,
        "attention": 2,
        "add_layer_norm": 4,
        "layer_norm": 2,
        "mlp": 2,
        "gelu": 1,
    },
    {
        "mlm_loss_fct": "cross_entropy",
        "distilbert.transformer.layer.0": "add_layer_norm",
        "distilbert.transformer.layer.0.attention": "attention",
        "distilbert.transformer.layer.1.ffn": "mlp",
    },
    dropout=("dropout", "attention_dropout"),
)
VIT = Family(
    "ViTForImageClassification",
    "ViTConfig",
    VISION | {"initializer_range": 0.2} | dict.fromkeys(DROPOUT, 0.0),
    {
        "attention": 2,
        "layer_norm": 3,
        "add_layer_norm": 2,
        "mlp": 2,
        "bias_dropout_add": 2,
    },
    {
        "vit.layers.0": "add_layer_norm",
        "vit.layers.0.attention": "attention",
        "vit.layers.1.mlp": "mlp",
        "vit.layers.1.mlp.fc2": "mlp",
    },
    inputs=lambda model: {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])},
    valid=lambda logits: logits,
)


def clip_logits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of the contrastive loss; token 96 is the end of a text."""
    ids = IDS.clone()
    ids[0, -1] = ids[1, 7] = 96
    return {
        "input_ids": ids,
        "attention_mask": MASK,
        "pixel_values": PIXELS,
        "return_loss": True,
    }


def clip_objective(output: Any) -> torch.Tensor:
    """Return the contrastive loss and more: its gradient alone is one number times another's."""
    embeds = torch.cat([output.text_embeds, output.image_embeds])
    targets = torch.cos(torch.arange(float(embeds.numel()))).view_as(embeds)
    return output.loss / 16 + (embeds - targets).square().sum()


CLIP = Family(
    "CLIPModel",
    "CLIPConfig",
    {
        "projection_dim": 32,
        "text_config": {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 40,
            "eos_token_id": 96,
            "attention_dropout": 0.0,
        },
        "vision_config": VISION | {"attention_dropout": 0.0},
        "initializer_factor": 5.0,
    },
    {"attention": 4, "layer_norm": 7, "add_layer_norm": 4, "mlp": 4},
    {
        "text_model.encoder.layers.1": "add_layer_norm",
        "text_model.encoder.layers.1.self_attn": "attention",
        "vision_model.encoder.layers.0.mlp": "mlp",
    },
    inputs=clip_logits,
    logits_name="logits_per_image",
    objective=clip_objective,
    valid=lambda logits: logits,
    dropout=(),
)
T5_SIZES = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
T5_OPS = {"cross_entropy": 1, "attention": 6, "rms_norm": 12, "bias_dropout_add": 10}
T5 = Family(
    "T5ForConditionalGeneration",
    "T5Config",
    T5_SIZES,
    T5_OPS | {"mlp": 4},
    {
        "encoder.block.0.layer.0": "bias_dropout_add",
        "encoder.block.0.layer.0.SelfAttention": "attention",
        "encoder.block.1.layer.0.layer_norm": "rms_norm",
        "decoder.block.1.layer.1.EncDecAttention": "attention",
        "decoder.block.1.layer.2.DenseReluDense": "mlp",
        "": "cross_entropy",
    },
    valid=lambda logits: logits,
    dropout=("dropout_rate",),
    smooth={"feed_forward_proj": "gelu"},
)
GATED_T5 = replace(
    T5,
    label="gated T5",
    options=T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ops=T5_OPS | {"linear_glu": 4},
    fused={"decoder.block.1.layer.2.DenseReluDense": "linear_glu"},
    smooth={},
)
WHISPER = Family(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        "vocab_size": 97,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 40,
        "init_std": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    {
        "cross_entropy": 1,
        "attention": 6,
        "layer_norm": 6,
        "add_layer_norm": 6,
        "mlp": 4,
        "bias_dropout_add": 4,
    },
    {
        "": "cross_entropy",
        "model.encoder.layers.0": "mlp",
        "model.encoder.layers.0.self_attn": "attention",
        "model.decoder.layers.1": "add_layer_norm",
        "model.decoder.layers.1.encoder_attn": "attention",
        "model.decoder.layers.1.encoder_attn_layer_norm": "add_layer_norm",
    },
    inputs=lambda model: {
        "input_features": SPECTRUM.to(model.dtype),
        "decoder_attention_mask": MASK,
        "labels": IDS,
    },
    dropout=("dropout", "attention_dropout", "activation_dropout"),
)
GENERATING = ("T5ForConditionalGeneration", "gated T5", "WhisperForConditionalGeneration")
FAMILIES = {
    each.label or each.name: each
    for each in (
        bert_like("Bert", base="bert", head="cls.predictions.transform"),
        bert_like("Roberta", base="roberta", head="lm_head"),
        bert_like("XLMRoberta", base="roberta", head="lm_head"),
        bert_like("Camembert", base="roberta", head="lm_head"),
        bert_like("Electra", base="electra", head="generator_predictions"),
        DISTILBERT,
        VIT,
        CLIP,
        T5,
        GATED_T5,
        WHISPER,
    )
}
of_each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@of_each_family
def test_training_matches_stock(family: Family, autocast: bool) -> None:
    patched, stock = family.pair(**(family.smooth if autocast else {}))
    assert_same_training(patched, stock, family.loss, autocast=autocast)


@of_each_family
def test_every_op_of_the_family_runs(family: Family) -> None:
    patched, _ = family.pair()
    with counted() as calls:
        family.loss(patched).backward()
    found = {op: count for op, count in calls.items() if not op.startswith("linear_act")}
    assert found == family.ops | {f"{op}_backward": count for op, count in family.ops.items()}


@of_each_family
def test_strict_accepts_the_family_and_the_report_names_its_modules(family: Family) -> None:
    report = fusedops.patch(family.model(), strict=True)
    assert not report.failed
    for name, op in family.fused.items():
        assert report[name].replaced
        assert op in report[name].op.split(", ")


@of_each_family
def test_state_dict_and_unpatch(family: Family) -> None:
    patched, stock = family.pair()
    before, values = stock.state_dict(), patched.state_dict()
    assert list(values) == list(before)
    assert all(torch.equal(values[name], before[name]) for name in before)
    stock.load_state_dict(values)
    fusedops.unpatch(patched)
    assert [type(each) for each in patched.modules()] == [type(each) for each in stock.modules()]
    first, again = gradients(stock, family.loss), gradients(patched, family.loss)
    assert all(torch.equal(first[name], again[name]) for name in first)


@of_each_family
def test_evaluation_of_a_padded_batch(family: Family) -> None:
    patched, stock = (model.eval() for model in family.pair(**dict.fromkeys(family.dropout, 0.5)))
    with torch.inference_mode():
        assert_close(family.logits(patched), family.logits(stock))


@of_each_family
def test_dropout_of_everything_is_seen_wherever_stock_has_it(family: Family) -> None:
    patched, stock = family.pair(**dict.fromkeys(family.dropout, 1.0))
    assert_close(family.logits(patched), family.logits(stock))


@of_each_family
def test_gradient_checkpointing_repeats_the_dropout(family: Family) -> None:
    patched, _ = family.pair(**dict.fromkeys(family.dropout, 0.3))
    whole = gradients(patched, family.loss)
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    with counted() as calls:
        recomputed = gradients(patched, family.loss)
    assert calls["attention"] == 2 * family.ops["attention"]
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


@of_each_family
def test_bfloat16_parameters(family: Family) -> None:
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    exact = family.logits(family.model().double())
    with counted() as calls:
        found = family.logits(patched)
    expected = family.logits(stock)
    assert found.dtype == expected.dtype
    assert set(family.ops) <= set(calls)
    error = (expected.double() - exact).norm()
    assert (found.double() - exact).norm() <= 1.5 * error


@of_each_family
def test_hooks_see_the_stock_values(family: Family) -> None:
    patched, stock = family.pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, found in zip((patched, stock), seen, strict=True):
        for module in model.modules():
            if module is not model and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(
                    lambda module, args, output, found=found: found.append(output)
                )
        family.loss(model)
    for actual, expected in zip(*seen, strict=True):
        assert_close(actual, expected)


@of_each_family
def test_attentions_and_hidden_states_are_recorded(family: Family) -> None:
    patched, stock = family.pair(attn_implementation="eager")
    found, expected = (
        model(**family.inputs(model), output_attentions=True, output_hidden_states=True)
        for model in (patched, stock)
    )
    for kind in (name for name in expected if name.endswith(("attentions", "hidden_states"))):
        assert len(found[kind]) == len(expected[kind]) > 0
        for actual, wanted in zip(found[kind], expected[kind], strict=True):
            assert_close(actual, wanted)


@of_each_family
def test_pickles(family: Family) -> None:
    patched, _ = family.pair()
    twin = pickle.loads(pickle.dumps(patched))
    assert [type(each) for each in twin.modules()] == [type(each) for each in patched.modules()]
    assert torch.equal(family.logits(twin), family.logits(patched))


@of_each_family
def test_hooks_on_all_modules_fire(family: Family) -> None:
    counts = []
    for model in family.pair():
        fired: list[nn.Module] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, fired=fired: fired.append(module)
        )
        family.loss(model)
        handle.remove()
        counts.append(len(fired))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", GENERATING)
def test_generation(name: str) -> None:
    family = FAMILIES[name]
    patched, stock = (model.eval() for model in family.pair())
    given = {name: value for name, value in family.inputs(stock).items() if name in PROMPTS}
    options = {"max_new_tokens": 8, "do_sample": False}
    with counted() as calls:
        tokens = patched.generate(**given, **options)
    assert calls["attention"] > 8
    assert torch.equal(tokens, stock.generate(**given, **options))


PROMPTS = ("input_ids", "attention_mask", "input_features")


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


def test_t5_with_another_gate_is_kept_and_reported() -> None:
    family = FAMILIES["gated T5"]
    stock = family.model(feed_forward_proj="gated-relu")
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    entry = report["encoder.block.0.layer.1.DenseReluDense"]
    assert not entry.replaced
    assert "no activation of linear_glu" in entry.reason
    assert_same_training(patched, stock, family.loss)


def test_whisper_in_training_calls_the_second_product_after_its_inner_dropout() -> None:
    family = FAMILIES["WhisperForConditionalGeneration"]
    patched, stock = family.pair(activation_dropout=1.0)
    assert describe(patched)["model.encoder.layers.0.fc2"].op == "linear_act"
    assert_close(family.logits(patched), family.logits(stock))
    assert describe(patched.eval())["model.encoder.layers.0.fc2"].reason.startswith("inside")


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_hook_on_a_bypassed_product_is_called(name: str) -> None:
    family = FAMILIES[name]
    patched, stock = family.pair()
    for model in (patched, stock):
        linears = [each for key, each in model.named_modules() if key.endswith(("fc1", ".wi"))]
        assert len(linears) == 4
        linears[-1].register_forward_hook(lambda module, args, output: output * 2)
    assert_close(family.logits(patched), family.logits(stock))


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
