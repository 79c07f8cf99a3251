"""Published models by name. A test compares each parameter count with the published one.

Sources: GPT-2 and GPT-3 (arXiv:2005.14165, table 2.1), BERT (arXiv:1810.04805), Llama 2 and 3
(arXiv:2307.09288, arXiv:2407.21783), Qwen3 (arXiv:2505.09388), Mixtral (arXiv:2401.04088), PanGu
(arXiv:2104.12369), CodeGeeX (arXiv:2303.17568), Switch (arXiv:2101.03961), and the configurations
that were released with the weights. ``pangu-moe-*`` are the rows of the scaling table of mixtures
of experts on 8, 16 and 32 devices.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from fusedops.models.config import RopeScaling, TransformerConfig


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> TransformerConfig:
    choices: dict[str, Any] = {"position_tables": 1, "activation": "gelu_tanh"}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=4 * hidden,
        **choices | more,
    )


_DROPOUT: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}
_GPT2: dict[str, Any] = {"vocab_size": 50257, "seq_len": 1024, "activation": "gelu_new", **_DROPOUT}
_GPT3: dict[str, Any] = {"vocab_size": 50257, "seq_len": 2048}
# The query layer on top has positions of its own.
_QUERY_LAYER: dict[str, Any] = {
    "position_tables": 2,
    "query_layer": True,
    "activation": "fast_gelu",
}
_PANGU: dict[str, Any] = {"vocab_size": 40000, "seq_len": 1024, **_QUERY_LAYER}
_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "seq_len": 512,
    "token_types": 2,
    "post_norm": True,
    "head": "masked",
    "activation": "gelu",
    "causal": False,
    "norm_eps": 1e-12,
    **_DROPOUT,
}


def _llama(
    layers: int, hidden: int, heads: int, inner: int, kv_heads: int, **more: Any
) -> TransformerConfig:
    choices: dict[str, Any] = {
        "vocab_size": 128256,
        "seq_len": 8192,
        "tied": False,
        "rope_theta": 500000.0,
    }
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        rotary=True,
        norm="rms",
        gated=True,
        activation="silu",
        bias=False,
        **choices | more,
    )


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "seq_len": 4096, "rope_theta": 10000.0}
_LLAMA3_SMALL: dict[str, Any] = {"tied": True, "rope_scaling": RopeScaling(factor=32.0)}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "seq_len": 4096,
    "head_dim": 128,
    "qk_norm": True,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}
_QWEN3_MOE: dict[str, Any] = {**_QWEN3, "num_experts": 128, "top_k": 8, "balance_loss": 0.001}
_MIXTRAL: dict[str, Any] = {
    "seq_len": 4096,
    "rope_theta": 1e6,
    "num_experts": 8,
    "top_k": 2,
    "balance_loss": 0.02,
}


def _switch(
    layers: int, hidden: int, heads: int, inner: int, experts: int, moe_layers: int
) -> TransformerConfig:
    """Switch: T5 with experts, one for each token; layers of the encoder, and as many behind."""
    return TransformerConfig(
        num_layers=layers,
        encoder_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=64,
        intermediate_size=inner,
        vocab_size=32128,
        seq_len=512,
        relative_buckets=32,
        norm="rms",
        activation="relu",
        bias=False,
        norm_eps=1e-6,
        num_experts=experts,
        moe_layers=moe_layers,
        router_normalize=False,
        capacity_factor=1.25,
        balance_loss=0.01,
        z_loss=0.001,
        **_DROPOUT,
    )


# One expert a token, weighed by its probability: normalised, it would always be 1.
_PANGU_MOE: dict[str, Any] = {
    **_PANGU,
    "router_normalize": False,
    "capacity_factor": 1.1,
    "balance_loss": 0.05,
}


PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _gpt(12, 768, 12, **_GPT2),
    "gpt2-medium": _gpt(24, 1024, 16, **_GPT2),
    "gpt2-large": _gpt(36, 1280, 20, **_GPT2),
    "gpt2-xl": _gpt(48, 1600, 25, **_GPT2),
    "gpt3-1.3b": _gpt(24, 2048, 16, **_GPT3),
    "gpt3-6.7b": _gpt(32, 4096, 32, **_GPT3),
    "gpt3-13b": _gpt(40, 5120, 40, **_GPT3),
    "gpt3": _gpt(96, 12288, 96, **_GPT3),
    "bert-base": _gpt(12, 768, 12, **_BERT),
    "bert-large": _gpt(24, 1024, 16, **_BERT),
    "llama2-7b": _llama(32, 4096, 32, 11008, 32, **_LLAMA2),
    "llama2-13b": _llama(40, 5120, 40, 13824, 40, **_LLAMA2),
    "llama2-70b": _llama(80, 8192, 64, 28672, 8, **_LLAMA2),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 8, **_LLAMA3_SMALL),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, 8, **_LLAMA3_SMALL),
    "llama3-8b": _llama(32, 4096, 32, 14336, 8),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8),
    "llama3-405b": _llama(126, 16384, 128, 53248, 8, rope_scaling=RopeScaling()),
    "qwen3-0.6b": _llama(28, 1024, 16, 3072, 8, **_QWEN3, tied=True),
    "qwen3-1.7b": _llama(28, 2048, 16, 6144, 8, **_QWEN3, tied=True),
    "qwen3-4b": _llama(36, 2560, 32, 9728, 8, **_QWEN3, tied=True),
    "qwen3-8b": _llama(36, 4096, 32, 12288, 8, **_QWEN3),
    "qwen3-14b": _llama(40, 5120, 40, 17408, 8, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 25600, 8, **_QWEN3),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 768, 4, **_QWEN3_MOE),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 1536, 4, **_QWEN3_MOE),
    "mixtral-8x7b": _llama(32, 4096, 32, 14336, 8, vocab_size=32000, **_MIXTRAL),
    "mixtral-8x22b": _llama(56, 6144, 48, 16384, 8, vocab_size=32768, **_MIXTRAL),
    "pangu-2.6b": _gpt(32, 2560, 32, **_PANGU),
    "pangu-13b": _gpt(40, 5120, 40, **_PANGU),
    "pangu-200b": _gpt(64, 16384, 128, **_PANGU),
    "pangu-moe-61b": _gpt(32, 2560, 32, **_PANGU_MOE, num_experts=36),
    "pangu-moe-121b": _gpt(32, 2560, 32, **_PANGU_MOE, num_experts=72),
    "pangu-moe-242b": _gpt(32, 2560, 32, **_PANGU_MOE, num_experts=144),
    "codegeex-13b": _gpt(40, 5120, 40, vocab_size=51200, seq_len=2048, **_QUERY_LAYER),
    "switch-base": _switch(12, 768, 12, 3072, experts=128, moe_layers=12),
    "switch-c": _switch(15, 2080, 32, 6144, experts=2048, moe_layers=30),
}

_TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_size": 256,
    "seq_len": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def _tiny(published: str, inner: int, **more: Any) -> TransformerConfig:
    """Return a published model's choices with sizes for tests: all of them even, words bytes."""
    return replace(PRESETS[published], intermediate_size=inner, **_TINY | more)


_ALIBI: dict[str, Any] = {"position_tables": 0, "alibi": True}
_SWITCH: dict[str, Any] = {
    "encoder_layers": 0,
    "relative_buckets": 0,
    "rotary": True,
    "head_dim": None,
    "num_experts": 4,
    "moe_layers": 1,
}

# For tests and first steps: each of these builds and trains in seconds.
TINY: dict[str, TransformerConfig] = {
    "tiny-gpt2": _tiny("gpt2", 256),
    "tiny-bert": _tiny("bert-base", 256),
    "tiny-alibi": _tiny("gpt2", 256, **_ALIBI),
    "tiny-llama": _tiny("llama3-8b", 176, num_kv_heads=2),
    "tiny-qwen3": _tiny("qwen3-0.6b", 176, num_kv_heads=2, head_dim=32),
    "tiny-mixtral": _tiny("mixtral-8x7b", 96, num_kv_heads=2, num_experts=4),
    "tiny-pangu": _tiny("pangu-2.6b", 256),
    "tiny-pangu-moe": _tiny("pangu-moe-61b", 128, num_experts=4),
    "tiny-switch": _tiny("switch-base", 128, **_SWITCH),
}


# A name less like another than this is no slip of the keyboard, and has no suggestion.
_NEAR = 0.65


def preset(name: str) -> TransformerConfig:
    """Return a published model by its name, or a tiny one (``tiny-llama``).

    Args:
        name: of ``PRESETS`` or ``TINY``, in any case.

    Returns:
        The configuration; ``dataclasses.replace`` changes it.

    Raises:
        ValueError: there is none of that name; the message has the nearest.

    Example:
        >>> preset("pangu-13b").num_layers
        40
    """
    config = PRESETS.get(name.lower()) or TINY.get(name.lower())
    if config is None:
        near = difflib.get_close_matches(name.lower(), [*PRESETS, *TINY], n=1, cutoff=_NEAR)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown model {name!r}: {hint}known: {', '.join(PRESETS)}")
    return config
