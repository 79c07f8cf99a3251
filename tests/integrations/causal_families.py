"""Causal language models of every family, in sizes that run in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from families import TEXT, build
from patch_testing import patched_pair
from torch import nn

IDS = torch.arange(2 * 12).mul(7).remainder(97).view(2, 12)
SIZES = TEXT | {
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
SPARSE_SIZES = {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # the one that runs in float64 and under autocast
}


@dataclass(frozen=True)
class Family:
    """A family in a size that runs in milliseconds.

    Attributes:
        name: what its classes begin with.
        options: of the configuration, beside ``SIZES``.
        ops: how often each op runs in a step of training without checkpointing.
        seed: for a family with experts one with which every choice of experts survives noise of
            some 2%: where half precision flips a choice, the result jumps, and no two programs
            flip the same.
        varied: which parameters and buffers are not left ones and zeros.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    varied: tuple[str, ...] = ("norm",)

    def model(self, **options: Any) -> nn.Module:
        return build(
            f"{self.name}ForCausalLM",
            f"{self.name}Config",
            SIZES | self.options | options,
            seed=self.seed,
            varied=self.varied,
        )

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        return patched_pair(self.model(**options))


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


def without(ops: dict[str, int], name: str) -> dict[str, int]:
    return {op: count for op, count in ops.items() if op != name}


def sparse(name: str, seed: int, options: dict[str, Any], **ops: int) -> Family:
    varied = ("norm", "bias")
    return Family(name, SPARSE_SIZES | options, MOE_OPS | ops, seed, varied)


LLAMA_OPS = {
    "cross_entropy": 1,
    "attention": 2,
    "rotary_embedding": 2,
    "rms_norm": 3,
    "add_rms_norm": 2,
    "linear_glu": 2,
}
PARALLEL_OPS = {"cross_entropy": 1, "attention": 2, "rotary_embedding": 2, "mlp": 2}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.1}
OPT_OPS = {
    "cross_entropy": 1,
    "attention": 2,
    "layer_norm": 3,
    "add_layer_norm": 2,
    "mlp": 2,
    "bias_dropout_add": 2,
}
GEMMA2 = GROUPED | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
DENSE = {
    each.name: each
    for each in (
        Family("Llama", GROUPED, LLAMA_OPS),
        Family("Mistral", GROUPED | {"sliding_window": 5}, LLAMA_OPS),
        Family("Qwen2", GROUPED, LLAMA_OPS),
        Family("Qwen3", GROUPED | {"head_dim": 16}, LLAMA_OPS | {"rms_norm": 3 + 4}),
        Family("Gemma", GROUPED | {"head_dim": 8}, LLAMA_OPS),
        Family("Gemma2", GEMMA2, LLAMA_OPS | {"rms_norm": 3 + 4}),
        Family("Phi", GROUPED, PARALLEL_OPS | {"layer_norm": 3}),
        Family("GPTNeoX", {}, PARALLEL_OPS | {"layer_norm": 5}),
        Family("OPT", OPT, OPT_OPS),
        Family("Phi3", GROUPED, without(LLAMA_OPS, "linear_glu") | {"swiglu": 2}),
    )
}
MOE_OPS = {
    "cross_entropy": 1,
    "attention": 2,
    "rotary_embedding": 2,
    "rms_norm": 3,
    "add_rms_norm": 2,
    "moe_route": 2,
    "moe_sort": 2,
    "moe_mlp": 2,
}
QWEN = {"num_experts": 6, "moe_intermediate_size": 24}
LATENT = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
GPT_OSS = {"num_local_experts": 6, "head_dim": 8, "sliding_window": 5}
SPARSE = {
    each.name: each
    for each in (
        sparse("Mixtral", 26, {"num_local_experts": 6, "sliding_window": 5}),
        sparse("Qwen2Moe", 26, QWEN | {"shared_expert_intermediate_size": 28}, linear_glu=2),
        sparse("Qwen3Moe", 8, QWEN | {"head_dim": 16, "norm_topk_prob": True}, rms_norm=7),
        sparse("Olmoe", 29, {"num_experts": 6, "clip_qkv": 0.5}, rms_norm=7),
        sparse(
            "DeepseekV3", 5, LATENT, linear_glu=2, rms_norm=7, moe_route=1, moe_sort=1, moe_mlp=1
        ),
        sparse("GptOss", 16, GPT_OSS),
    )
}
