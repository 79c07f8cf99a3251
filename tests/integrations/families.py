"""Small models of every type, in sizes that run in milliseconds: a row each of a few tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from patch_testing import patched_pair
from torch import nn

transformers = pytest.importorskip("transformers")

LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = LAYERS | {"vocab_size": 97}
IDS = torch.arange(2 * 12).mul(7).remainder(97).view(2, 12)
LEFT_PADDING = torch.ones_like(IDS)
LEFT_PADDING[0, :3] = 0
Inputs = Callable[[nn.Module], dict[str, torch.Tensor]]


def loss(model: nn.Module) -> torch.Tensor:
    """Return the loss of a causal language model."""
    return model(IDS, labels=IDS).loss


def labelled(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a causal language model in training."""
    return {"input_ids": IDS, "labels": IDS}


def padded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the arguments of a causal language model in evaluation."""
    return {"input_ids": IDS, "attention_mask": LEFT_PADDING}


@dataclass(frozen=True)
class Family:
    """A model type; the tests of all types are its columns.

    Attributes:
        name: of the tests; of a causal language model what its classes begin with.
        cls: of the model.
        config: of its configuration's class.
        options: of the configuration.
        ops: how often each op runs in a step of training without checkpointing.
        inputs: the arguments of the model, labels included.
        prompt: its arguments in evaluation, of which generation takes those that it knows.
        valid: takes from the logits of ``prompt`` those that are not of padding.
        logits_name: of the model's output.
        objective: the loss, from the model's output.
        dropout: the options that are probabilities of dropout.
        smooth: options without ReLU, for half precision: its slope jumps, and whichever way an
            argument near 0 is rounded is right.
        draws: of the weights that a comparison under autocast takes the largest errors of; 0: one,
            without a redraw. A scalar parameter needs several, and so does the bias of a key, whose
            gradient is a difference of large numbers.
        seed: for a type with experts one with which every choice of experts survives noise of
            some 2%: where half precision flips a choice, the result jumps, and no two programs
            flip the same.
        varied: parts of the names of parameters and buffers that are not left ones and zeros,
            which hide for which of two modules a weight was.
        frozen: parts of the names of parameters that a step gives no gradient.
        failed: the classes that have a rule, of which modules are not replaced.
        forward_only: the ops of ``ops`` that have no backward, or run without gradients.
        generates: whether the model has ``generate``.
    """

    name: str
    cls: str
    config: str
    options: dict[str, Any]
    ops: dict[str, int]
    inputs: Inputs = labelled
    prompt: Inputs = padded
    valid: Callable[[torch.Tensor], torch.Tensor] = field(
        default=lambda logits: logits[LEFT_PADDING > 0]
    )
    logits_name: str = "logits"
    objective: Callable[[Any], torch.Tensor] = field(default=lambda output: output.loss)
    dropout: tuple[str, ...] = ()
    smooth: dict[str, Any] = field(default_factory=dict)
    draws: int = 0
    seed: int = 0
    varied: Sequence[str] = ("norm",)
    frozen: Sequence[str] = ()
    failed: Sequence[str] = ()
    forward_only: Sequence[str] = ("moe_sort",)
    generates: bool = False

    def model(self, **options: Any) -> nn.Module:
        """Return a model in training, the same at every call."""
        torch.manual_seed(self.seed)
        config = getattr(transformers, self.config)(**self.options | options)
        model = getattr(transformers, self.cls)(config).train()
        with torch.no_grad():
            for key, value in [*model.named_parameters(), *model.named_buffers()]:
                if any(part in key.lower() for part in self.varied):
                    value.add_(torch.randn_like(value), alpha=0.1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        """Return the model patched, and stock."""
        return patched_pair(self.model(**options))

    def loss(self, model: nn.Module) -> torch.Tensor:
        return self.objective(model(**self.inputs(model)))

    def logits(self, model: nn.Module) -> torch.Tensor:
        """Return the logits that are not of padding."""
        return self.valid(getattr(model(**self.prompt(model)), self.logits_name))


def by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


def variant(family: Family, label: str, options: dict[str, Any], **ops: int) -> Family:
    """Return a row with other options; an op that does not run has the count 0."""
    ops = {op: count for op, count in (family.ops | ops).items() if count}
    name = f"{family.name}, {label}"
    return replace(family, name=name, options=family.options | options, ops=ops)


def needs_sdpa(family: Family) -> None:
    """Skip the test if this transformers has no ``sdpa`` for a family, as 5.24 for Gemma 2."""
    if not getattr(transformers, family.cls)._supports_sdpa:
        pytest.skip(f"{family.name} has no sdpa")


# Causal language models with a table.

SIZES = TEXT | {"max_position_embeddings": 32, "initializer_range": 0.1}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
GROUPED = {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}


def causal(name: str, options: dict[str, Any], ops: dict[str, int], **columns: Any) -> Family:
    """Return the row of a type whose configuration takes ``SIZES``, loss included."""
    config = columns.pop("config", f"{name}Config")
    columns = {"dropout": ("attention_dropout",), "generates": True} | columns
    ops = {"cross_entropy": 1} | ops
    return Family(name, f"{name}ForCausalLM", config, SIZES | options, ops, **columns)


def sparse(name: str, seed: int, options: dict[str, Any], **ops: int) -> Family:
    """Return the row of a type with experts, whose configuration takes ``SPARSE_SIZES``."""
    options, ops = SPARSE_SIZES | options, MOE_OPS | ops
    return causal(name, options, ops, seed=seed, varied=("norm", "bias"))


LLAMA_OPS = {"cross_entropy": 1, "attention": 2, "rotary_embedding": 2, "rms_norm": 5}
LLAMA_OPS |= {"linear_glu": 2}
PARALLEL_OPS = {"attention": 2, "rotary_embedding": 2, "mlp": 2}
OPT_OPS = {"cross_entropy": 1, "attention": 2, "layer_norm": 3, "mlp": 2}
OPT_OPS |= {"add_layer_norm": 2, "bias_dropout_add": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.1}
GEMMA2 = HEADS | {"sliding_window": 5, "query_pre_attn_scalar": 8}
PHI3_OPS = {op: count for op, count in LLAMA_OPS.items() if op != "linear_glu"} | {"swiglu": 2}
DENSE = by_name(
    causal("Llama", GROUPED, LLAMA_OPS),
    causal("Mistral", GROUPED | {"sliding_window": 5}, LLAMA_OPS),
    causal("Qwen2", GROUPED, LLAMA_OPS),
    causal("Qwen3", GROUPED | {"head_dim": 16}, LLAMA_OPS | {"rms_norm": 5 + 4}),
    causal("Gemma", HEADS, LLAMA_OPS),
    causal("Gemma2", GEMMA2, LLAMA_OPS | {"rms_norm": 5 + 4}),
    causal("Phi", GROUPED, PARALLEL_OPS | {"layer_norm": 3}, dropout=("resid_pdrop",)),
    causal("GPTNeoX", {}, PARALLEL_OPS | {"layer_norm": 5}, dropout=("hidden_dropout",)),
    causal("OPT", OPT, OPT_OPS, dropout=("dropout",)),
    causal("Phi3", GROUPED, PHI3_OPS, dropout=("resid_pdrop",)),
)
SPARSE_SIZES = GROUPED | {
    "intermediate_size": 40,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # the one that runs in float64 and under autocast
}
MOE_OPS = {"attention": 2, "rotary_embedding": 2, "rms_norm": 5, "moe_sort": 2, "moe_mlp": 2}
QWEN = {"num_experts": 6, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "v_head_dim": 12}
LATENT |= {"moe_intermediate_size": 24, "num_key_value_heads": 4}
LATENT |= {"first_k_dense_replace": 1, "num_mtp_layers": 0}
LATENT_OPS = {"linear_glu": 2, "rms_norm": 9, "moe_sort": 1, "moe_mlp": 1}
GPT_OSS = {"num_local_experts": 6, "head_dim": 8, "sliding_window": 5}
SPARSE = by_name(
    sparse("Mixtral", 26, {"num_local_experts": 6, "sliding_window": 5}),
    sparse("Qwen2Moe", 26, QWEN | {"shared_expert_intermediate_size": 28}, linear_glu=2),
    sparse("Qwen3Moe", 8, QWEN | {"head_dim": 16, "norm_topk_prob": True}, rms_norm=9),
    sparse("Olmoe", 11, {"num_experts": 6, "clip_qkv": 0.5}, rms_norm=9),
    sparse("DeepseekV3", 5, LATENT, **LATENT_OPS),
    sparse("GptOss", 16, GPT_OSS),
)
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 = Family(
    "GPT2",
    "GPT2LMHeadModel",
    "GPT2Config",
    SIZES | GPT | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    {"cross_entropy": 1, "attention": 2, "layer_norm": 5, "mlp": 2},
    dropout=("attn_pdrop", "resid_pdrop"),
    varied=("ln_",),
    generates=True,
)

# Encoders and encoder-decoders with a table.

TOKENS = torch.arange(2, 2 * 12 + 2).mul(7).remainder(97).view(2, 12)
MASK = torch.ones_like(TOKENS)
MASK[1, 8:] = 0
LABELS = TOKENS.masked_fill(TOKENS % 5 == 1, -100)
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
    return {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS}


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


def bert_like(prefix: str, **options: Any) -> Family:
    """Return a family whose modules are BERT's."""
    ops = {"cross_entropy": 1, "attention": 2, "add_layer_norm": 4, "layer_norm": 2}
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
    ids = TOKENS.clone()
    ids[0, -1] = ids[1, 7] = 96
    texts = {"input_ids": ids, "attention_mask": MASK}
    return texts | {"pixel_values": PIXELS, "return_loss": True}


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
        "labels": TOKENS,
    },
    dropout=("dropout", "attention_dropout", "activation_dropout"),
    generates=True,
)
ENCODERS = by_name(
    *map(bert_like, ("Bert", "Roberta", "XLMRoberta", "Camembert")),
    bert_like("Electra", embedding_size=32),
    *(DISTILBERT, VIT, CLIP, T5, GATED_T5, WHISPER),
)
BERT = ENCODERS["BertForMaskedLM"]

# Types without a table: their layers are copies of those above, or known by their code.


def by_code(name: str, options: dict[str, Any], columns: Any = None, **ops: int) -> Family:
    return causal(name, options, ops, draws=4, **(columns or {}))


NEMOTRON_H_OPS = {"attention": 1, "rms_norm": 3, "mlp": 1}
NEMOTRON_H_OPS |= {"moe_sort": 1, "moe_mlp": 1}
NEMOTRON_H = HEADS | {
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # which runs in float64 and under autocast
    "layers_block_type": ["attention", "moe"],
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
}
# From 5.24 on it asks the registry.
GPTJ_ATTENTION = {"attention": 2} if transformers.__version__ >= "5.24" else {}
MULTI_QUERY = {"new_decoder_architecture": False, "multi_query": True, "bias": False}
FALCON_FAILS = {"failed": ("FalconLinear",)}
SEED_OSS = HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0}
DECODERS_BY_CODE = by_name(
    by_code("Granite", GROUPED, attention=2, rotary_embedding=2, rms_norm=5, linear_glu=2),
    by_code("SmolLM3", GROUPED, **LLAMA_OPS),
    by_code("Olmo2", GROUPED, attention=2, rms_norm=9, linear_glu=2),
    by_code("Glm4", HEADS, attention=2, rms_norm=9, swiglu=2),
    by_code("Ministral", HEADS, **LLAMA_OPS),
    by_code("Gemma3", HEADS, {"config": "Gemma3TextConfig"}, **LLAMA_OPS | {"rms_norm": 13}),
    by_code("HunYuanDenseV1", HEADS, **LLAMA_OPS | {"rms_norm": 5 + 4}),
    by_code("StableLm", GROUPED, attention=2, rotary_embedding=2, layer_norm=5, linear_glu=2),
    by_code("Cohere", {}, attention=2, layer_norm=3, linear_glu=2),
    by_code("GPTJ", GPT | {"rotary_dim": 8}, **GPTJ_ATTENTION, layer_norm=3, mlp=2),
    by_code("Helium", HEADS, attention=2, rms_norm=5, linear_glu=2),
    by_code("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, layer_norm=5, mlp=2),
    by_code("NanoChat", GROUPED, attention=2, rms_norm=10, mlp=2),
    by_code("Olmo", {}, attention=2, layer_norm=5, linear_glu=2),
    by_code("SeedOss", SEED_OSS, **LLAMA_OPS),
    by_code("Starcoder2", GROUPED, **PARALLEL_OPS, layer_norm=5),
    by_code("Bloom", {"n_head": 4}, layer_norm=6, mlp=2),
    by_code("Falcon", MULTI_QUERY, FALCON_FAILS, layer_norm=3, mlp=2),
    by_code("NemotronH", NEMOTRON_H, **NEMOTRON_H_OPS),
)

# Types with recurrent mixers, of which the first layer has one; where a layer may choose experts or
# keys, it chooses all.

CONVOLVED = {"causal_conv1d": 1}
ATTENDED = {"attention": 1, "rms_norm": 7, "linear_glu": 2}
DELTA_OPS = ATTENDED | CONVOLVED | {"gated_delta_rule": 1, "gated_rms_norm": 1}
QWEN_OPS = DELTA_OPS | {"rotary_embedding": 1}
QWEN_MOE_OPS = QWEN_OPS | {"moe_sort": 2, "moe_mlp": 2}
GLM5_OPS = DELTA_OPS | {"layer_norm": 1}
SPACE_OPS = CONVOLVED | {"selective_state_space": 1, "gated_rms_norm": 1, "rms_norm": 5}
MAMBA2_OPS = dict.fromkeys(SPACE_OPS, 2) | {"rms_norm": 3}
SCAN_OPS = {"causal_conv1d": 2, "selective_scan": 2, "rms_norm": 3}
LFM2_OPS = ATTENDED | CONVOLVED | {"rotary_embedding": 1}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = GROUPED | MIXED | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
QWEN_DELTA = DELTA | {"head_dim": 8}
ALL_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALL_EXPERTS |= {"shared_expert_intermediate_size": 28, "experts_implementation": "eager"}
QWEN4 = {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1}
QWEN4 |= {"indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 2}
KIMI = MIXED | {"linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4}
KIMI |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
KIMI |= {"mlp_layer_types": ["dense", "dense"], "moe_intermediate_size": 24}
GLM5 = SIZES | KIMI | {"q_lora_rank": 24, "qk_rope_head_dim": 0, "hc_mult": 2, "index_topk": 16}
GLM5 |= {"index_head_dim": 8, "index_n_heads": 2, "index_kpool": 2}
GLM5_VISION = VISION | {"depth": 1, "num_heads": 4, "out_hidden_size": 32}
SPACE = GROUPED | {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_d_state": 8}
SPACE |= {"mamba_chunk_size": 8}
FALCON_H1 = GROUPED | {"mlp_multipliers": [0.7, 1.3], "mamba_d_ssm": 32, "mamba_n_heads": 4}
FALCON_H1 |= dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8)
FALCON_H1_OPS = {
    "gated_rms_norm": 0,
    "rms_norm": 5,
    "attention": 2,
    "rotary_embedding": 2,
    "swiglu": 2,
}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8}
NEMOTRON_MAMBA = HEADS | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4}
NEMOTRON_MAMBA |= {"mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
ZAMBA = {"layers_block_type": ["hybrid", "hybrid"], "n_mamba_heads": 2, "mamba_d_state": 8}
ZAMBA |= {"num_key_value_heads": 4}
ZAMBA_OPS = {"selective_scan": 4, "rms_norm": 7, "attention": 2, "linear_glu": 2}
ZAMBA2 = ZAMBA | {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4}
ZAMBA2 |= {"num_mem_blocks": 1, "mamba_ngroups": 2, "chunk_size": 8}
JAMBA = GROUPED | {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
JAMBA |= {"expert_layer_period": 4, "expert_layer_offset": 3}
LFM2 = GROUPED | {"layer_types": ["conv", "full_attention"]}
INKLING = HEADS | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
INKLING |= {"sliding_window_size": 5, "d_rel": 4, "rel_extent": 16}
INKLING |= {"mlp_layer_types": ["dense", "dense"]}
INKLING_OPS = {"causal_conv1d": 8, "rms_norm": 10, "attention": 2, "linear_glu": 2}


def hybrid(name: str, options: dict[str, Any], ops: dict[str, int], **columns: Any) -> Family:
    """Return the row of a type with recurrent mixers."""
    varied = ("norm", "dt_bias", "mixer.d", "mamba.d")
    ops = {op: count for op, count in ops.items() if count}
    return causal(name, options, ops, draws=4, varied=varied, **columns)


def text(name: str) -> dict[str, str]:
    return {"config": f"{name}TextConfig"}


HYBRIDS = by_name(
    hybrid("Qwen3Next", QWEN_DELTA | {"mlp_only_layers": [0, 1]}, QWEN_OPS),
    hybrid("Qwen3_5", QWEN_DELTA, QWEN_OPS, **text("Qwen3_5")),
    hybrid("Qwen3_5Moe", QWEN_DELTA | ALL_EXPERTS, QWEN_MOE_OPS, **text("Qwen3_5Moe")),
    hybrid(
        "Qwen4Exp",
        QWEN_DELTA | ALL_EXPERTS | QWEN4,
        QWEN_MOE_OPS | {"rotary_embedding": 0, "rms_norm": 25, "rms_norm_backward": 2},
        forward_only=("moe_sort", "rms_norm", "rms_norm_backward"),
        **text("Qwen4Exp"),
        frozen=("indexer",),
        failed=("Qwen4ExpTextRMSNorm",),
    ),
    hybrid("OlmoHybrid", DELTA, DELTA_OPS),
    hybrid("KimiLinear", KIMI | {"q_lora_rank": None}, DELTA_OPS | {"rms_norm": 6}),
    replace(
        hybrid("Glm5Next", {}, GLM5_OPS, frozen=("visual", "indexer"), dropout=()),
        forward_only=("layer_norm",),  # of the choice of keys
        cls="Glm5NextForConditionalGeneration",
        options={"text_config": GLM5, "vision_config": GLM5_VISION, "image_token_id": 96}
        | {"video_token_id": 95, "image_start_token_id": 94, "image_end_token_id": 93},
    ),
    hybrid("Mamba2", MAMBA2, MAMBA2_OPS),
    hybrid("NemotronH", NEMOTRON_MAMBA, SPACE_OPS | {"attention": 1, "rms_norm": 3}),
    hybrid("Bamba", SPACE | {"attn_layer_indices": [1]}, SPACE_OPS | LFM2_OPS | {"rms_norm": 5}),
    hybrid(
        "GraniteMoeHybrid",
        SPACE | {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
        SPACE_OPS | {"attention": 1, "swiglu": 2},
    ),
    hybrid("Zamba2", ZAMBA2, MAMBA2_OPS | {"rms_norm": 5, "attention": 1, "gelu": 1}),
    hybrid("FalconH1", FALCON_H1, MAMBA2_OPS | FALCON_H1_OPS),
    hybrid("Mamba", {"state_size": 8}, SCAN_OPS),
    hybrid("FalconMamba", {"state_size": 8}, SCAN_OPS | {"rms_norm": 9}),
    hybrid("Jamba", JAMBA, ATTENDED | CONVOLVED | {"selective_scan": 1, "rms_norm": 8}),
    hybrid("Zamba", ZAMBA, SCAN_OPS | ZAMBA_OPS),
    hybrid("Lfm2", LFM2, LFM2_OPS),
    hybrid("Lfm2Moe", LFM2 | {"num_dense_layers": 2}, LFM2_OPS),
    hybrid("Inkling", INKLING, INKLING_OPS, **text("Inkling")),
)
# In 5.15 the decorator of their forward hides it; KimiLinear came with 5.17.
if transformers.__version__ < "5.17":
    HYBRIDS = {}

# Encoder-decoders without a table.

SPECIAL_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BART_SIZES = TWO_STACKS | {"max_position_embeddings": 64} | SPECIAL_TOKENS
BART_SIZES |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
NO_DROPOUT |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def bart_like(
    prefix: str, ops: dict[str, int], options: dict[str, Any] | None = None, **columns: Any
) -> Family:
    """Return a family without a table, which has its loss in its own forward."""
    columns = {
        "cls": f"{prefix}ForConditionalGeneration",
        "inputs": lambda model: {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS},
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
ALL_DENSE = {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
BART_LIKE = by_name(
    bart_like("Bart", POST_NORM_OPS),
    bart_like("MBart", PRE_NORM_OPS | {"layer_norm": 12}),
    bart_like("Pegasus", PRE_NORM_OPS, frozen=POSITIONS),
    bart_like("M2M100", M2M100_OPS),
    bart_like("Blenderbot", PRE_NORM_OPS),
    bart_like("PLBart", POST_NORM_OPS),
    bart_like("Marian", POST_NORM_OPS | {"layer_norm": 10}, cls="MarianMTModel", frozen=POSITIONS),
    bart_like("NllbMoe", {"layer_norm": 12, "mlp": 4}, ALL_DENSE, failed=("NllbMoeAttention",)),
)
NORM_AFTER = {"do_layer_norm_before": False}
NORM_AFTER_OPS = {"layer_norm": 0, "add_layer_norm": 4, "bias_dropout_add": 0}
BARE = {"enable_bias": False, "layer_norm_elementwise_affine": False}
TWO_PRODUCTS = {"moe_mlp": 0, "moe_permute": 2, "grouped_mm": 4, "moe_unpermute": 2}
VARIANTS = by_name(
    variant(DENSE["GPTNeoX"], "in sequence", {"use_parallel_residual": False}),
    variant(DENSE["OPT"], "norm after", NORM_AFTER, **NORM_AFTER_OPS),
    variant(DENSE["OPT"], "bare", BARE),
    variant(DENSE["OPT"], "norm after, bare", NORM_AFTER | BARE, **NORM_AFTER_OPS),
    variant(DENSE["Gemma2"], "capped", {"attn_logit_softcapping": 0.1}),
    variant(SPARSE["Mixtral"], "GELU", {"hidden_act": "gelu"}),
    variant(SPARSE["Mixtral"], "Mish", {"hidden_act": "mish"}, **TWO_PRODUCTS),
    variant(SPARSE["DeepseekV3"], "halves", {"rope_interleave": False}),
    variant(GATED_T5, "gated ReLU", {"feed_forward_proj": "gated-relu"}),
    variant(GATED_T5, "gated tanh", {"feed_forward_proj": "gated-tanh"}, linear_glu=0),
)
CORE = DENSE | SPARSE | {"GPT2": GPT2} | ENCODERS
BY_CODE = DECODERS_BY_CODE | HYBRIDS | BART_LIKE | VARIANTS
ALL = CORE | BY_CODE
