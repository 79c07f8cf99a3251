"""Models of transformers whose attention is written out in their own code, in small sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from families import LAYERS, TEXT
from torch import nn

transformers = pytest.importorskip("transformers")

DECODER = {"d_model": 32, "vocab_size": 97, "pad_token_id": 1, "max_position_embeddings": 64}
ENCODER_DECODER = DECODER | {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
IMAGES = {"image_size": 32, "num_labels": 3}


class WrittenFamily(NamedTuple):
    """A model, and what it is called with.

    Attributes:
        model: name of its class.
        config: name of its configuration's class.
        options: of the configuration.
        kind: ``causal``, ``masked``, ``seq2seq`` or ``image``.
        calls: of the op in a forward.
    """

    model: str
    config: str
    options: dict[str, Any]
    kind: str
    calls: int = 2


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "bos_token_id": 1}
FAMILIES: dict[str, WrittenFamily] = {
    "megatron": WrittenFamily("MegatronBertForMaskedLM", "MegatronBertConfig", TEXT, "masked"),
    "rembert": WrittenFamily(
        "RemBertForMaskedLM",
        "RemBertConfig",
        TEXT | {"input_embedding_size": 16, "output_embedding_size": 16},
        "masked",
    ),
    "roformer": WrittenFamily(
        "RoFormerForMaskedLM", "RoFormerConfig", TEXT | {"embedding_size": 32}, "masked"
    ),
    "roformer causal": WrittenFamily(
        "RoFormerForCausalLM",
        "RoFormerConfig",
        TEXT | {"embedding_size": 32, "is_decoder": True, "rotary_value": True},
        "causal",
    ),
    "mpnet": WrittenFamily("MPNetForMaskedLM", "MPNetConfig", TEXT, "masked"),
    "convbert": WrittenFamily(
        "ConvBertForMaskedLM", "ConvBertConfig", TEXT | {"embedding_size": 32}, "masked"
    ),
    "deberta": WrittenFamily(
        "DebertaForMaskedLM",
        "DebertaConfig",
        TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "masked",
    ),
    "deberta v2": WrittenFamily(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "masked",
    ),
    "luke": WrittenFamily(
        "LukeForMaskedLM",
        "LukeConfig",
        TEXT | {"entity_vocab_size": 9, "entity_emb_size": 16},
        "masked",
    ),
    "layoutlm": WrittenFamily("LayoutLMForMaskedLM", "LayoutLMConfig", TEXT, "masked"),
    "tapas": WrittenFamily("TapasForMaskedLM", "TapasConfig", TEXT, "masked"),
    "funnel": WrittenFamily(
        "FunnelForMaskedLM",
        "FunnelConfig",
        {"vocab_size": 97, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8}
        | {"d_inner": 48, "num_decoder_layers": 1},
        "masked",
        3,
    ),
    "xlm": WrittenFamily(
        "XLMWithLMHeadModel",
        "XLMConfig",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 97},
        "masked",
    ),
    "nystromformer": WrittenFamily(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        TEXT | {"segment_means_seq_len": 12, "num_landmarks": 12, "conv_kernel_size": 3},
        "masked",
    ),
    "xlnet": WrittenFamily(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 97, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "masked",
    ),
    "gptj": WrittenFamily("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}, "causal"),
    "codegen": WrittenFamily(
        "CodeGenForCausalLM", "CodeGenConfig", GPT | {"rotary_dim": 4}, "causal"
    ),
    "gpt neo": WrittenFamily(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "window_size": 3}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
        "causal",
    ),
    "neox japanese": WrittenFamily(
        "GPTNeoXJapaneseForCausalLM",
        "GPTNeoXJapaneseConfig",
        LAYERS | {"vocab_size": 97, "intermediate_multiple_size": 2},
        "causal",
    ),
    "git": WrittenFamily(
        "GitForCausalLM",
        "GitConfig",
        TEXT | {"vision_config": LAYERS | {"image_size": 16, "patch_size": 8}},
        "causal",
    ),
    "trocr": WrittenFamily(
        "TrOCRForCausalLM",
        "TrOCRConfig",
        DECODER
        | {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
        | {"cross_attention_hidden_size": 32},
        "causal",
    ),
    "mvp": WrittenFamily("MvpForConditionalGeneration", "MvpConfig", ENCODER_DECODER, "seq2seq", 6),
    "fsmt": WrittenFamily(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        ENCODER_DECODER | {"src_vocab_size": 97, "tgt_vocab_size": 97, "langs": ["a", "b"]},
        "seq2seq",
        6,
    ),
    "pegasus x": WrittenFamily(
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        ENCODER_DECODER | {"num_global_tokens": 4, "block_size": 4},
        "seq2seq",
        6,
    ),
    "prophetnet": WrittenFamily(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}
        | {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64},
        "seq2seq",
        6,
    ),
    "nllb moe": WrittenFamily(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        ENCODER_DECODER | {"num_experts": 4, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
        "seq2seq",
        6,
    ),
    "switch": WrittenFamily(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
        | {"num_decoder_layers": 2, "decoder_start_token_id": 0, "num_experts": 2}
        | {"router_jitter_noise": 0.0},
        "seq2seq",
        6,
    ),
    "donut": WrittenFamily(
        "DonutSwinForImageClassification",
        "DonutSwinConfig",
        IMAGES
        | {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 4},
        "image",
        4,
    ),
    "cvt": WrittenFamily(
        "CvtForImageClassification",
        "CvtConfig",
        {"num_labels": 3, "embed_dim": [16, 32, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        "image",
        6,
    ),
    "pvt": WrittenFamily(
        "PvtForImageClassification",
        "PvtConfig",
        IMAGES
        | {"depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [16, 32]}
        | {"num_attention_heads": [2, 4], "sequence_reduction_ratios": [2, 1]},
        "image",
    ),
    "pvt v2": WrittenFamily(
        "PvtV2ForImageClassification",
        "PvtV2Config",
        IMAGES
        | {"depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [16, 32]}
        | {"num_attention_heads": [2, 4], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
        | {"patch_sizes": [7, 3], "strides": [4, 2]},
        "image",
    ),
    "mobilevit": WrittenFamily(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        IMAGES | {"hidden_sizes": [16, 20, 24], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 8]},
        "image",
        9,
    ),
}
_DROPOUTS = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "dropout", "attention_dropout"),
    *(
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "embed_dropout",
        "resid_dropout",
        "hidden_dropout",
    ),
    *("activation_dropout", "dropout_rate", "drop_path_rate", "attn_dropout", "layerdrop"),
    *("encoder_layerdrop", "decoder_layerdrop", "summary_first_dropout", "classifier_dropout"),
)


def written_model(name: str, **options: Any) -> nn.Module:
    """Return a model in training without dropout, the same at every call."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.options)
    for key in _DROPOUTS:
        if isinstance(getattr(config, key, None), float):
            setattr(config, key, 0.0)
    for key in ("attention_drop_rate", "drop_rate", "drop_path_rate"):
        if family.config == "CvtConfig":
            setattr(config, key, [0.0, 0.0, 0.0])
    for key, value in options.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, family.model)(config).train()
    with torch.no_grad():  # biases and position tables of zeros hide where a term belongs
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def arguments(name: str, *, padded: bool = True) -> dict[str, Any]:
    """Return the arguments of a training step."""
    generator = torch.Generator().manual_seed(1)
    kind = FAMILIES[name].kind
    if kind == "image":
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels}
    tokens = torch.randint(3, 97, (2, 12), generator=generator)
    call: dict[str, Any] = {"input_ids": tokens}
    if kind == "seq2seq":
        call["decoder_input_ids"] = tokens.roll(1, 1)
    if padded:
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, 9:] = 0
        call["attention_mask"] = mask
    return call


def loss_of(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    """Return a loss of a forward that ignores what stands at padding.

    A query that may see no key gets 0 from the op, and the mean of all values in stock.
    """
    logits = model(**call).logits
    logits = logits.float() if logits.dtype != torch.float64 else logits
    weights = torch.linspace(-1.0, 1.0, logits.numel(), dtype=logits.dtype).view_as(logits).sin()
    mask = call.get("attention_mask")
    if mask is not None and mask.shape == logits.shape[:2]:
        weights = weights * mask[..., None]
    return (logits * weights).mean()
