"""Causal language models and their bodies, in sizes that run in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from families import IDS, TEXT, Family, by_name, transformers, variant
from torch import nn

SIZES = TEXT | {"max_position_embeddings": 32, "initializer_range": 0.1}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
GROUPED = {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
ATTENTION_DROPOUT = ("attention_dropout",)


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


def causal(name: str, options: dict[str, Any], ops: dict[str, int], **columns: Any) -> Family:
    """Return the row of a type whose configuration takes ``SIZES``, loss included."""
    config = columns.pop("config", f"{name}Config")
    columns = {"dropout": ATTENTION_DROPOUT, "generates": True} | columns
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
LATENT_HEADS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT = LATENT_HEADS | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "v_head_dim": 12}
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
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = Family(
    "GPT2",
    "GPT2LMHeadModel",
    "GPT2Config",
    SIZES | GPT | NO_DROPOUT,
    {"cross_entropy": 1, "attention": 2, "layer_norm": 5, "mlp": 2},
    dropout=("attn_pdrop", "resid_pdrop"),
    varied=("ln_",),
    generates=True,
)

# Types without a table: their layers are copies of those above, or known by their code.


def by_code(name: str, options: dict[str, Any], columns: Any = None, **ops: int) -> Family:
    return causal(name, options, ops, draws=4, **(columns or {}))


def _fails(*classes: str) -> dict[str, Any]:
    return {"failed": classes}


FALCON_H1 = GROUPED | {"mlp_multipliers": [0.7, 1.3], "mamba_d_ssm": 32, "mamba_n_heads": 4}
FALCON_H1 |= dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8)
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
SEED_OSS = HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0}
NANO_CHAT_OPS = {"attention": 2, "rms_norm": 10, "mlp": 2}
OLMO_OPS = {"attention": 2, "layer_norm": 5, "linear_glu": 2}
STARCODER2_OPS = PARALLEL_OPS | {"layer_norm": 5}
BY_CODE = by_name(
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
    by_code("NanoChat", GROUPED, **NANO_CHAT_OPS),
    by_code("Olmo", {}, **OLMO_OPS),
    by_code("SeedOss", SEED_OSS, **LLAMA_OPS),
    by_code("Starcoder2", GROUPED, **STARCODER2_OPS),
    by_code("Bloom", {"n_head": 4}, layer_norm=6, mlp=2),
    by_code("Falcon", MULTI_QUERY, _fails("FalconLinear"), layer_norm=3, mlp=2),
    by_code("FalconH1", FALCON_H1, attention=2, rotary_embedding=2, rms_norm=5, swiglu=2),
    by_code("NemotronH", NEMOTRON_H, **NEMOTRON_H_OPS),
)


NORM_AFTER = {"do_layer_norm_before": False}
NORM_AFTER_OPS = {"layer_norm": 0, "add_layer_norm": 4, "bias_dropout_add": 0}
BARE = {"enable_bias": False, "layer_norm_elementwise_affine": False}
IN_SEQUENCE = {"use_parallel_residual": False}
TWO_PRODUCTS = {"moe_mlp": 0, "moe_permute": 2, "grouped_mm": 4, "moe_unpermute": 2}
VARIANTS = by_name(
    variant(DENSE["GPTNeoX"], "in sequence", IN_SEQUENCE),
    variant(DENSE["OPT"], "norm after", NORM_AFTER, **NORM_AFTER_OPS),
    variant(DENSE["OPT"], "bare", BARE),
    variant(DENSE["OPT"], "norm after, bare", NORM_AFTER | BARE, **NORM_AFTER_OPS),
    variant(DENSE["Gemma2"], "capped", {"attn_logit_softcapping": 0.1}),
    variant(SPARSE["Mixtral"], "GELU", {"hidden_act": "gelu"}),
    variant(SPARSE["Mixtral"], "Mish", {"hidden_act": "mish"}, **TWO_PRODUCTS),
    variant(SPARSE["DeepseekV3"], "halves", {"rope_interleave": False}),
)
