"""What a transformer is, from a configuration of transformers, and the other way.

Only what ``TransformerConfig`` describes exactly is taken; the tests compare each family's
parameters with those of the modules. Sizes and choices stand apart: the planner asks for sizes
alone, of models too whose choices nothing here computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.models.config import RopeScaling, TransformerConfig, describe

Values = Mapping[str, Any]

# transformers' names of activations, by ours.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "fast_gelu",
    "relu": "relu",
    "silu": "silu",
}


def from_config(config: Any, *, sizes_only: bool = False) -> TransformerConfig:
    """Return what a model is that transformers builds.

    Args:
        config: a configuration, what its ``to_dict`` gives, or the path of a ``config.json``.
        sizes_only: leave what no size depends on (dropout, rotations, routing) at its default, and
            do not refuse what nothing here computes of it.

    Returns:
        Its ``TransformerConfig``.

    Raises:
        ValueError: the family is none of those that are known, a size is missing, the file is no
            configuration, or it asks for what ``Transformer`` does not compute.
        TypeError: it is none of these.

    Example:
        >>> from fusedops.models import from_config
        >>> small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
        >>> from_config(small | {"vocab_size": 512, "n_positions": 128}).parameters().total
        141056
    """
    values = _values(config)
    family = values.get("model_type")
    checks.choice("from_config", "model_type", family, _FAMILIES)
    assert isinstance(family, str)
    sizes, choices = _FAMILIES[family]
    try:
        return TransformerConfig(**sizes(values) | ({} if sizes_only else choices(values)))
    except KeyError as error:
        raise ValueError(f"from_config: the configuration has no {error.args[0]}") from None


def _values(config: Any) -> Values:
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        expected = "a configuration of transformers, a dictionary or a path"
        checks.fail_type("from_config", "config", expected, config)
    try:
        values = json.loads(Path(config).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {config}: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"{config} is not valid JSON") from None
    if not isinstance(values, dict):
        raise ValueError(f"{config} is no configuration of a model")
    return values


def _activation(values: Values, name: str, default: str) -> str:
    given = values.get(name) or default
    checks.choice("from_config", name, given, _ACTIVATIONS)
    return _ACTIVATIONS[given]


def _gpt2(values: Values) -> dict[str, Any]:
    return {
        "hidden_size": values["n_embd"],
        "num_layers": values["n_layer"],
        "num_heads": values["n_head"],
        "intermediate_size": values.get("n_inner") or 4 * values["n_embd"],
        "vocab_size": values["vocab_size"],
        "seq_len": values["n_positions"],
        "position_tables": 1,
        "activation": _activation(values, "activation_function", "gelu_new"),
        "tied": values.get("tie_word_embeddings", True),
    }


# Sizes of all families but GPT-2, by our names; without the vocabulary's.
_COMMON = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "seq_len": "max_position_embeddings",
}


def _common(values: Values) -> dict[str, Any]:
    sizes = {ours: values[theirs] for ours, theirs in _COMMON.items()}
    return sizes | {"vocab_size": values["vocab_size"]}


def _bert(values: Values) -> dict[str, Any]:
    return _common(values) | {
        "position_tables": 1,
        "token_types": values.get("type_vocab_size", 2),
        "post_norm": True,
        "head": "masked",
        "activation": _activation(values, "hidden_act", "gelu"),
        "tied": values.get("tie_word_embeddings", True),
    }


def _llama(values: Values, **more: Any) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            checks.fail("from_config", name, "false", values[name])
    given = {
        "num_kv_heads": values.get("num_key_value_heads"),
        "head_dim": values.get("head_dim"),
        "rotary": True,
        "norm": "rms",
        "gated": True,
        "activation": _activation(values, "hidden_act", "silu"),
        "bias": False,
        "tied": values.get("tie_word_embeddings", False),
    }
    return _common(values) | given | more


def _qwen3(values: Values) -> dict[str, Any]:
    return _llama(values, qk_norm=True, head_dim=values.get("head_dim") or 128)


def _mixtral(values: Values) -> dict[str, Any]:
    experts = values["num_local_experts"]
    return _llama(values, num_experts=experts, top_k=values["num_experts_per_tok"])


def _qwen3_moe(values: Values) -> dict[str, Any]:
    dense = values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1
    if dense:
        checks.fail("from_config", "mlp_only_layers", "empty: every layer sparse", dense)
    # Its name in files, and from transformers 5.17 on in objects.
    name = "num_experts" if "num_experts" in values else "num_local_experts"
    return _llama(
        values,
        qk_norm=True,
        head_dim=values.get("head_dim") or 128,
        num_experts=values[name],
        top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size"],
    )


def _wants(values: Values, name: str, expected: Any, default: Any = None) -> None:
    """Raise where the configuration asks for what ``Transformer`` does not compute."""
    given = values.get(name, expected if default is None else default)
    if given != expected:
        checks.fail("from_config", name, repr(expected), checks.shown(given))


def _padding(values: Values, default: int | None = None) -> dict[str, Any]:
    """Return the row without a gradient; GPT-2's embedding has none whatever its entry says."""
    row = values.get("pad_token_id", default)
    if row is not None and row < 0:  # from the end, as torch.nn.Embedding counts
        row += values["vocab_size"]
    return {"pad_token_id": row}


def _gpt2_choices(values: Values) -> dict[str, Any]:
    _wants(values, "scale_attn_weights", True)
    _wants(values, "scale_attn_by_inverse_layer_idx", False)
    _wants(values, "add_cross_attention", False)
    dropout = values.get("resid_pdrop", 0.1)
    _wants(values, "embd_pdrop", dropout, 0.1)
    return {
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "dropout": dropout,
        "attention_dropout": values.get("attn_pdrop", 0.1),
        "initializer_range": values.get("initializer_range", 0.02),
    }


def _bert_choices(values: Values) -> dict[str, Any]:
    _wants(values, "is_decoder", False)
    _wants(values, "add_cross_attention", False)
    _wants(values, "position_embedding_type", "absolute")
    return {
        "causal": False,
        "norm_eps": values.get("layer_norm_eps", 1e-12),
        "dropout": values.get("hidden_dropout_prob", 0.1),
        "attention_dropout": values.get("attention_probs_dropout_prob", 0.1),
        "initializer_range": values.get("initializer_range", 0.02),
        **_padding(values, 0),
    }


def _llama_choices(values: Values) -> dict[str, Any]:
    return {
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "attention_dropout": values.get("attention_dropout", 0.0),
        "initializer_range": values.get("initializer_range", 0.02),
        **_rotations(values),
        **_padding(values),
    }


def _rotations(values: Values) -> dict[str, Any]:
    """Return the rotations, as transformers 5 writes them or in the two entries before that."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = given.get("rope_theta") or values.get("rope_theta") or 10000.0
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rope_theta": float(theta)}
    if kind != "llama3":
        checks.fail("from_config", "rope_type", "'default' or 'llama3'", checks.shown(kind))
    scaling = RopeScaling(
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_seq_len=given["original_max_position_embeddings"],
    )
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _mistral_choices(values: Values) -> dict[str, Any]:
    return _llama_choices(values) | {"sliding_window": values.get("sliding_window")}


def _qwen3_choices(values: Values) -> dict[str, Any]:
    _wants(values, "use_sliding_window", False)
    return _llama_choices(values)


def _mixtral_choices(values: Values) -> dict[str, Any]:
    _wants(values, "router_jitter_noise", 0.0)
    return _mistral_choices(values) | {"balance_loss": values.get("router_aux_loss_coef", 0.001)}


def _qwen3_moe_choices(values: Values) -> dict[str, Any]:
    return _qwen3_choices(values) | {
        "router_normalize": values.get("norm_topk_prob", False),
        "balance_loss": values.get("router_aux_loss_coef", 0.001),
    }


Reader = Callable[[Values], dict[str, Any]]

# Sizes and choices of each family.
_FAMILIES: dict[str, tuple[Reader, Reader]] = {
    "gpt2": (_gpt2, _gpt2_choices),
    "bert": (_bert, _bert_choices),
    "llama": (_llama, _llama_choices),
    "mistral": (_llama, _mistral_choices),
    "qwen3": (_qwen3, _qwen3_choices),
    "mixtral": (_mixtral, _mixtral_choices),
    "qwen3_moe": (_qwen3_moe, _qwen3_moe_choices),
}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def to_config(config: TransformerConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds for the family of transformers that computes the same.

    Args:
        config: of a model.

    Returns:
        The entries, ``model_type`` and ``architectures`` among them; ``from_config`` reads them as
        the same ``config``, but for the z-loss, for which transformers has no word.

    Raises:
        UnsupportedError: no family of transformers computes the same.
    """
    family = _family(config)
    writer = {"gpt2": _to_gpt2, "bert": _to_bert}.get(family, _to_llama)
    values = writer(config)
    values |= {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": config.vocab_size,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied,
    }
    # What these entries leave out would come back as another model.
    described = describe(replace(from_config(values), z_loss=config.z_loss))
    differ = [name for name, value in describe(config).items() if described[name] != value]
    if differ:
        raise checks.UnsupportedError(
            f"to_config: no family of transformers computes the same model: {family}, the nearest, "
            f"does not have its {', '.join(differ)}"
        )
    return values


def _family(config: TransformerConfig) -> str:
    if config.norm == "layer":
        return "bert" if config.head == "masked" else "gpt2"
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.qk_norm:
        return "qwen3"
    return "llama" if config.sliding_window is None else "mistral"


def _name_of(config: TransformerConfig) -> str:
    return next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)


def _to_gpt2(config: TransformerConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.seq_len,
        "activation_function": _name_of(config),
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _to_common(config: TransformerConfig) -> dict[str, Any]:
    sizes = {theirs: getattr(config, ours) for ours, theirs in _COMMON.items()}
    return sizes | {"hidden_act": _name_of(config), "pad_token_id": config.pad_token_id}


def _to_bert(config: TransformerConfig) -> dict[str, Any]:
    return _to_common(config) | {
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


def _to_llama(config: TransformerConfig) -> dict[str, Any]:
    values = _to_common(config) | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.size_of_head,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        # Two entries that every version of transformers reads.
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_values(config.rope_scaling),
        "sliding_window": config.sliding_window,
    }
    if config.num_experts:
        values |= {
            "num_experts_per_tok": config.top_k,
            "router_aux_loss_coef": config.balance_loss,
        }
        if config.qk_norm:
            values |= {
                "num_experts": config.num_experts,
                "moe_intermediate_size": config.intermediate_size,
                "norm_topk_prob": config.router_normalize,
            }
        else:
            values["num_local_experts"] = config.num_experts
    return values


def _scaling_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
