"""Published models by name. A test compares each parameter count with the published one.

Sources: GPT-2 and GPT-3 (arXiv:2005.14165, table 2.1), BERT (arXiv:1810.04805), Llama 2 and 3
(arXiv:2307.09288, arXiv:2407.21783), Qwen3 (arXiv:2505.09388), Mixtral (arXiv:2401.04088), PanGu
(arXiv:2104.12369), CodeGeeX (arXiv:2303.17568), and the configurations that were released with the
weights. ``pangu-moe-*`` are the rows of the scaling table of mixtures of experts on 8, 16 and 32
devices.
"""

from __future__ import annotations

import difflib
from typing import Any

from fusedops.models.config import RopeScaling, TransformerConfig

Choices = dict[str, Any]

_DROPOUT: Choices = {"dropout": 0.1, "attention_dropout": 0.1}
_GPT3: Choices = {
    "vocab_size": 50257,
    "seq_len": 2048,
    "position_tables": 1,
    "activation": "gelu_tanh",
}
_GPT2: Choices = _GPT3 | _DROPOUT | {"seq_len": 1024, "activation": "gelu_new"}
_BERT: Choices = _DROPOUT | {
    "vocab_size": 30522,
    "seq_len": 512,
    "position_tables": 1,
    "token_types": 2,
    "post_norm": True,
    "head": "masked",
    "activation": "gelu",
    "causal": False,
    "norm_eps": 1e-12,
}
# The query layer on top has positions of its own.
_CODEGEEX: Choices = {
    "vocab_size": 51200,
    "seq_len": 2048,
    "position_tables": 2,
    "query_layer": True,
    "activation": "fast_gelu",
}
_PANGU: Choices = _CODEGEEX | {"vocab_size": 40000, "seq_len": 1024}
# One expert a token, weighed by its probability: normalised, it would always be 1.
_ONE_EXPERT: Choices = {"router_normalize": False}
_PANGU_MOE: Choices = _PANGU | _ONE_EXPERT | {"capacity_factor": 1.1, "balance_loss": 0.05}
_LLAMA3: Choices = {
    "vocab_size": 128256,
    "seq_len": 8192,
    "rotary": True,
    "rope_theta": 500000.0,
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "bias": False,
    "tied": False,
}
_LLAMA2: Choices = _LLAMA3 | {"vocab_size": 32000, "seq_len": 4096, "rope_theta": 10000.0}
_LLAMA3_SMALL: Choices = _LLAMA3 | {"tied": True, "rope_scaling": RopeScaling(factor=32.0)}
_QWEN3: Choices = _LLAMA3 | {
    "vocab_size": 151936,
    "seq_len": 4096,
    "head_dim": 128,
    "qk_norm": True,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}
_QWEN3_SMALL: Choices = _QWEN3 | {"tied": True}
_QWEN3_MOE: Choices = _QWEN3 | {"num_experts": 128, "top_k": 8, "balance_loss": 0.001}
_MIXTRAL: Choices = _LLAMA2 | {
    "rope_theta": 1e6,
    "num_experts": 8,
    "top_k": 2,
    "balance_loss": 0.02,
}


def _model(
    choices: Choices,
    layers: int,
    hidden: int,
    heads: int,
    inner: int | None = None,
    kv_heads: int | None = None,
    **more: Any,
) -> TransformerConfig:
    """Return the choices of a family with the sizes of one model; ``inner`` is ``4 * hidden``."""
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": 4 * hidden if inner is None else inner,
    }
    return TransformerConfig(**choices | sizes | more)


PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _model(_GPT2, 12, 768, 12),
    "gpt2-medium": _model(_GPT2, 24, 1024, 16),
    "gpt2-large": _model(_GPT2, 36, 1280, 20),
    "gpt2-xl": _model(_GPT2, 48, 1600, 25),
    "gpt3-1.3b": _model(_GPT3, 24, 2048, 16),
    "gpt3-6.7b": _model(_GPT3, 32, 4096, 32),
    "gpt3-13b": _model(_GPT3, 40, 5120, 40),
    "gpt3": _model(_GPT3, 96, 12288, 96),
    "bert-base": _model(_BERT, 12, 768, 12),
    "bert-large": _model(_BERT, 24, 1024, 16),
    "llama2-7b": _model(_LLAMA2, 32, 4096, 32, 11008, 32),
    "llama2-13b": _model(_LLAMA2, 40, 5120, 40, 13824, 40),
    "llama2-70b": _model(_LLAMA2, 80, 8192, 64, 28672, 8),
    "llama3.2-1b": _model(_LLAMA3_SMALL, 16, 2048, 32, 8192, 8),
    "llama3.2-3b": _model(_LLAMA3_SMALL, 28, 3072, 24, 8192, 8),
    "llama3-8b": _model(_LLAMA3, 32, 4096, 32, 14336, 8),
    "llama3-70b": _model(_LLAMA3, 80, 8192, 64, 28672, 8),
    "llama3-405b": _model(_LLAMA3, 126, 16384, 128, 53248, 8, rope_scaling=RopeScaling()),
    "qwen3-0.6b": _model(_QWEN3_SMALL, 28, 1024, 16, 3072, 8),
    "qwen3-1.7b": _model(_QWEN3_SMALL, 28, 2048, 16, 6144, 8),
    "qwen3-4b": _model(_QWEN3_SMALL, 36, 2560, 32, 9728, 8),
    "qwen3-8b": _model(_QWEN3, 36, 4096, 32, 12288, 8),
    "qwen3-14b": _model(_QWEN3, 40, 5120, 40, 17408, 8),
    "qwen3-32b": _model(_QWEN3, 64, 5120, 64, 25600, 8),
    "qwen3-30b-a3b": _model(_QWEN3_MOE, 48, 2048, 32, 768, 4),
    "qwen3-235b-a22b": _model(_QWEN3_MOE, 94, 4096, 64, 1536, 4),
    "mixtral-8x7b": _model(_MIXTRAL, 32, 4096, 32, 14336, 8),
    "mixtral-8x22b": _model(_MIXTRAL, 56, 6144, 48, 16384, 8, vocab_size=32768),
    "pangu-2.6b": _model(_PANGU, 32, 2560, 32),
    "pangu-13b": _model(_PANGU, 40, 5120, 40),
    "pangu-200b": _model(_PANGU, 64, 16384, 128),
    "pangu-moe-61b": _model(_PANGU_MOE, 32, 2560, 32, num_experts=36),
    "pangu-moe-121b": _model(_PANGU_MOE, 32, 2560, 32, num_experts=72),
    "pangu-moe-242b": _model(_PANGU_MOE, 32, 2560, 32, num_experts=144),
    "codegeex-13b": _model(_CODEGEEX, 40, 5120, 40),
}


def _tiny(choices: Choices, inner: int = 256, **more: Any) -> TransformerConfig:
    """Return a family's choices with sizes for tests: all of them even, words bytes."""
    sizes = {"vocab_size": 256, "seq_len": 64, "dropout": 0.0, "attention_dropout": 0.0}
    return _model(choices | sizes, 2, 64, 4, inner, **more)


_ALIBI: Choices = _GPT2 | {"position_tables": 0, "alibi": True}
# The experts of Switch Transformers (arXiv:2101.03961) in a decoder.
_SWITCH: Choices = _ONE_EXPERT | {
    "rotary": True,
    "norm": "rms",
    "activation": "relu",
    "bias": False,
    "norm_eps": 1e-6,
    "num_experts": 4,
    "moe_layers": 1,
    "capacity_factor": 1.25,
    "balance_loss": 0.01,
    "z_loss": 0.001,
}

# For tests and first steps: each of these builds and trains in seconds.
TINY: dict[str, TransformerConfig] = {
    "tiny-gpt2": _tiny(_GPT2),
    "tiny-bert": _tiny(_BERT),
    "tiny-alibi": _tiny(_ALIBI),
    "tiny-llama": _tiny(_LLAMA3, 176, kv_heads=2),
    "tiny-qwen3": _tiny(_QWEN3_SMALL, 176, kv_heads=2, head_dim=32),
    "tiny-mixtral": _tiny(_MIXTRAL, 96, kv_heads=2, num_experts=4),
    "tiny-pangu": _tiny(_PANGU),
    "tiny-pangu-moe": _tiny(_PANGU_MOE, 128, num_experts=4),
    "tiny-switch": _tiny(_SWITCH, 128),
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
