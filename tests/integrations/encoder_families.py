"""Encoders and encoder-decoders of every family, in sizes that run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from families import LAYERS, TEXT, build
from patch_testing import patched_pair
from torch import nn

IDS = torch.arange(2, 2 * 12 + 2).mul(7).remainder(97).view(2, 12)
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
BERT_SIZES = TEXT | {
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VISION = LAYERS | {"image_size": 16, "patch_size": 4}
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
        draws: of the weights that a comparison in half precision takes the largest errors of;
            0: one, without a redraw. A scalar parameter needs several.
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
    draws: int = 0
    label: str = ""

    def model(self, **options: Any) -> nn.Module:
        return build(self.name, self.config, self.options | options, varied=("norm",))

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        return patched_pair(self.model(**options))

    def loss(self, model: nn.Module) -> torch.Tensor:
        return self.objective(model(**self.inputs(model)))

    def logits(self, model: nn.Module) -> torch.Tensor:
        return self.valid(getattr(model(**self.inputs(model)), self.logits_name))


def bert_like(prefix: str, *, base: str, head: str | None = None, norms: int = 2) -> Family:
    """Return a family whose modules are BERT's; ``head``: the fused layer before the projection."""
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
            **({} if head is None else {head: "linear_act"}),
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
        "text_config": TEXT
        | {
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
    draws=16,
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
FAMILIES = {
    each.label or each.name: each
    for each in (
        bert_like("Bert", base="bert", head="cls.predictions.transform"),
        bert_like("Roberta", base="roberta"),
        bert_like("XLMRoberta", base="roberta"),
        bert_like("Camembert", base="roberta"),
        bert_like("Electra", base="electra", head="generator_predictions"),
        DISTILBERT,
        VIT,
        CLIP,
        T5,
        GATED_T5,
        WHISPER,
    )
}
