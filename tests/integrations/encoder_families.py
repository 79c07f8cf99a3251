"""Encoders and encoder-decoders of every family, in sizes that run in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from families import LAYERS, TEXT, Family, by_name, variant
from torch import nn

IDS = torch.arange(2, 2 * 12 + 2).mul(7).remainder(97).view(2, 12)
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
LABELS = IDS.masked_fill(IDS % 5 == 1, -100)
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
LENGTH = {"max_position_embeddings": 40}
BERT_SIZES = TEXT | LENGTH | {"initializer_range": 0.2} | dict.fromkeys(DROPOUT, 0.0)
VISION = LAYERS | {"image_size": 16, "patch_size": 4}
PIXELS = torch.sin(torch.arange(2.0 * 3 * 16 * 16)).view(2, 3, 16, 16)
SPECTRUM = torch.sin(torch.arange(2.0 * 8 * 32)).view(2, 8, 32)
TWO_STACKS = (
    {"d_model": 32, "vocab_size": 97}
    | dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
)


def masked(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a masked language model."""
    return {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}


def all_tokens(logits: torch.Tensor) -> torch.Tensor:
    return logits


def encoder(
    name: str, options: dict[str, Any], ops: dict[str, int], config: str, **columns: Any
) -> Family:
    """Return a row; what is compared in evaluation are the logits of training."""
    inputs = columns.setdefault("inputs", masked)
    cls = columns.pop("cls", name)
    columns = {"prompt": inputs, "valid": lambda logits: logits[MASK > 0]} | columns
    return Family(name, cls, f"{config}Config", options, ops, **columns)


def bert_like(prefix: str, *, norms: int = 2, **options: Any) -> Family:
    """Return a family whose modules are BERT's."""
    ops = {"cross_entropy": 1, "attention": 2, "add_layer_norm": 4, "layer_norm": norms}
    name = f"{prefix}ForMaskedLM"
    return encoder(name, BERT_SIZES | options, ops, prefix, dropout=DROPOUT)


DISTILBERT = encoder(
    "DistilBertForMaskedLM",
    {"vocab_size": 97, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    | LENGTH
    | {"initializer_range": 0.2, "dropout": 0.0, "attention_dropout": 0.0},
    {"cross_entropy": 1, "attention": 2, "layer_norm": 6, "mlp": 2, "gelu": 1},
    "DistilBert",
    dropout=("dropout", "attention_dropout"),
)
VIT = encoder(
    "ViTForImageClassification",
    VISION | {"initializer_range": 0.2} | dict.fromkeys(DROPOUT, 0.0),
    {"attention": 2, "layer_norm": 5, "mlp": 2},
    "ViT",
    inputs=lambda model: {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])},
    valid=all_tokens,
    dropout=DROPOUT,
)


def clip_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
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


CLIP = encoder(
    "CLIPModel",
    {
        "projection_dim": 32,
        "text_config": TEXT | LENGTH | {"eos_token_id": 96, "attention_dropout": 0.0},
        "vision_config": VISION | {"attention_dropout": 0.0},
        "initializer_factor": 5.0,
    },
    {"attention": 4, "layer_norm": 11, "mlp": 4},
    "CLIP",
    inputs=clip_inputs,
    logits_name="logits_per_image",
    objective=clip_objective,
    valid=all_tokens,
    draws=16,
)
T5_SIZES = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5_SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0}
T5_SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
T5_OPS = {"cross_entropy": 1, "attention": 6, "rms_norm": 12, "bias_dropout_add": 10}
T5 = encoder(
    "T5ForConditionalGeneration",
    T5_SIZES,
    T5_OPS | {"mlp": 4},
    "T5",
    valid=all_tokens,
    dropout=("dropout_rate",),
    smooth={"feed_forward_proj": "gelu"},
    generates=True,
)
GATED_T5 = replace(
    T5,
    name="gated T5",
    options=T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ops=T5_OPS | {"linear_glu": 4},
    smooth={},
)
WHISPER = encoder(
    "WhisperForConditionalGeneration",
    TWO_STACKS
    | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40, "init_std": 0.2}
    | dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    | {"pad_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None},
    {"cross_entropy": 1, "attention": 6, "layer_norm": 6, "add_layer_norm": 6}
    | {"mlp": 4, "bias_dropout_add": 4},
    "Whisper",
    inputs=lambda model: {
        "input_features": SPECTRUM.to(model.dtype),
        "decoder_attention_mask": MASK,
        "labels": IDS,
    },
    dropout=("dropout", "attention_dropout", "activation_dropout"),
    generates=True,
)
FAMILIES = by_name(
    *map(bert_like, ("Bert", "Roberta", "XLMRoberta", "Camembert")),
    bert_like("Electra", embedding_size=32),
    *(DISTILBERT, VIT, CLIP, T5, GATED_T5, WHISPER),
)
BART_SIZES = TWO_STACKS | {
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
NO_DROPOUT |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def bart_like(
    prefix: str, ops: dict[str, int], options: dict[str, Any] | None = None, **columns: Any
) -> Family:
    """Return a family without a table, which has its loss in its own forward."""
    columns = {
        "cls": f"{prefix}ForConditionalGeneration",
        "inputs": lambda model: {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS},
        "valid": all_tokens,
        "draws": 4,
        "dropout": ("dropout", "attention_dropout", "activation_dropout"),
        "smooth": {"activation_function": "gelu"},
        "generates": True,
    } | columns
    options = BART_SIZES | NO_DROPOUT | {"init_std": 0.2} | (options or {})
    return encoder(prefix, options, {"cross_entropy": 1} | ops, prefix, **columns)


POST_NORM_OPS = {"attention": 6, "layer_norm": 12, "gelu": 4}
PRE_NORM_OPS = {"attention": 6, "layer_norm": 10, "gelu": 2, "mlp": 2}
PRE_NORM_OPS |= {"add_layer_norm": 2, "bias_dropout_add": 2}
M2M100_OPS = {op: count for op, count in PRE_NORM_OPS.items() if op != "gelu"}
POSITIONS = ("embed_positions",)  # are constants
DENSE = {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
BY_CODE = by_name(
    bart_like("Bart", POST_NORM_OPS),
    bart_like("MBart", PRE_NORM_OPS | {"layer_norm": 12}),
    bart_like("Pegasus", PRE_NORM_OPS, frozen=POSITIONS),
    bart_like("M2M100", M2M100_OPS),
    bart_like("Blenderbot", PRE_NORM_OPS),
    bart_like("PLBart", POST_NORM_OPS),
    bart_like("Marian", POST_NORM_OPS | {"layer_norm": 10}, cls="MarianMTModel", frozen=POSITIONS),
    bart_like("NllbMoe", {"layer_norm": 12, "mlp": 4}, DENSE, failed=("NllbMoeAttention",)),
)
VARIANTS = by_name(
    variant(GATED_T5, "gated ReLU", {"feed_forward_proj": "gated-relu"}),
    variant(GATED_T5, "gated tanh", {"feed_forward_proj": "gated-tanh"}, linear_glu=0),
)
