"""Types of transformers whose feed-forward layers or experts are known by code or registry alone.

A patched model trains as the stock one, and the ops that its layers should call are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from causal_families import GROUPED, IDS, SIZES
from families import build
from patch_testing import assert_same_training, counted, patched_pair
from torch import nn


def causal_loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


def hidden_loss(model: nn.Module) -> torch.Tensor:
    """Return a loss of a model without labels, which attends to all tokens."""
    hidden = model(IDS).last_hidden_state
    return (hidden * torch.cos(torch.arange(float(hidden.numel()))).view_as(hidden)).sum()


def translation_loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, decoder_input_ids=IDS, labels=IDS).loss


@dataclass(frozen=True)
class ModelType:
    """A type in a size that runs in milliseconds.

    Attributes:
        model: the class of the model.
        options: of its configuration.
        ops: how often ops run in a step.
        config: the class of the configuration; that of the model's prefix by default.
        loss: of a step.
        seed: with which no choice of experts flips under noise.
        varied: parts of the names of parameters that are not left ones and zeros.
        frozen: parts of the names of parameters that a step gives no gradient.
        sizes: of all causal models, where the configuration takes them.
    """

    model: str
    options: dict[str, Any]
    ops: dict[str, int]
    config: str = ""
    loss: Callable[[nn.Module], torch.Tensor] = causal_loss
    seed: int = 0
    varied: tuple[str, ...] = ("norm",)
    frozen: tuple[str, ...] = ()
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)

    def pair(self, **options: Any) -> tuple[nn.Module, nn.Module]:
        config = self.config or self.model.removesuffix("ForCausalLM") + "Config"
        stock = build(
            self.model,
            config,
            self.sizes | self.options | options,
            seed=self.seed,
            varied=self.varied,
        )
        for name, parameter in stock.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return patched_pair(stock)


EXPERTS = GROUPED | {
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # which runs in float64 and under autocast
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
XLM = {
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_words": 97,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 2,
}
TRANSLATION = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
TYPES = {
    "bloom": ModelType("BloomForCausalLM", {"n_head": 4}, {"mlp": 2}),
    "falcon_h1": ModelType(
        "FalconH1ForCausalLM",
        GROUPED
        | {
            "mlp_multipliers": [0.7, 1.3],
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
        {"swiglu": 2},
    ),
    "xlnet": ModelType(
        "XLNetModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0},
        {"mlp": 2},
        "XLNetConfig",
        hidden_loss,
        frozen=("mask_emb", "seg_embed", "r_s_bias"),
        sizes={"vocab_size": 97},
    ),
    "funnel": ModelType(
        "FunnelBaseModel",
        {
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "num_decoder_layers": 1,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        {"mlp": 2},
        "FunnelConfig",
        hidden_loss,
        sizes={"vocab_size": 97},
    ),
    "falcon": ModelType(
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": True, "bias": False},
        {"mlp": 2},
    ),
    "cpmant": ModelType(
        "CpmAntModel",
        {"dim_head": 8, "dim_ff": 48, "prompt_length": 2, "dropout_p": 0.0},
        {"linear_glu": 2},
        config="CpmAntConfig",
        loss=hidden_loss,
        varied=("norm", "bias"),
    ),
    "xlm": ModelType("XLMModel", XLM, {"mlp": 2}, "XLMConfig", hidden_loss),
    "flaubert": ModelType("FlaubertModel", XLM, {"mlp": 2}, "FlaubertConfig", hidden_loss),
    "nllb-moe": ModelType(
        "NllbMoeForConditionalGeneration",
        TRANSLATION | {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
        {"mlp": 4},
        "NllbMoeConfig",
        translation_loss,
    ),
    "nemotron_h": ModelType(
        "NemotronHForCausalLM",
        EXPERTS
        | {
            "layers_block_type": ["attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 28,
        },
        {"moe_mlp": 1, "mlp": 1},
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.usefixtures("own_products")
def test_training_matches_stock(name: str, autocast: bool) -> None:
    patched, stock = TYPES[name].pair()
    with counted() as calls:
        TYPES[name].loss(patched)
    assert {op: calls[op] for op in TYPES[name].ops} == TYPES[name].ops
    draws = 4 if autocast else 0
    assert_same_training(patched, stock, TYPES[name].loss, autocast=autocast, draws=draws)
