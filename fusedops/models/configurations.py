"""What a transformer is, from a configuration of transformers: an object, or its JSON file.

Only what ``TransformerConfig`` describes exactly is taken; the tests compare each family's
parameters with those of the modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig

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


def from_config(config: Any) -> TransformerConfig:
    """Return the sizes of a model that transformers builds.

    Args:
        config: a configuration, what its ``to_dict`` gives, or the path of a ``config.json``.

    Raises:
        ValueError: the family is none of those that are known, a size is missing, or the file is no
            configuration.
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
    try:
        return _FAMILIES[family](values)
    except KeyError as error:
        raise ValueError(f"from_config: the configuration has no {error.args[0]}") from None


def _values(config: Any) -> Values:
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        wanted = "a configuration of transformers, a dictionary or a path"
        raise TypeError(f"from_config: config must be {wanted}, got {checks.type_name(config)}")
    try:
        found = json.loads(Path(config).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {config}: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"{config} is not valid JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{config} is no configuration of a model")
    return found


def _activation(values: Values, name: str, default: str) -> str:
    given = values.get(name) or default
    checks.choice("from_config", name, given, _ACTIVATIONS)
    return _ACTIVATIONS[given]


def _gpt2(values: Values) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=values["n_embd"],
        num_layers=values["n_layer"],
        num_heads=values["n_head"],
        intermediate_size=values.get("n_inner") or 4 * values["n_embd"],
        vocab_size=values["vocab_size"],
        seq_len=values["n_positions"],
        position_tables=1,
        activation=_activation(values, "activation_function", "gelu_new"),
        tied=values.get("tie_word_embeddings", True),
    )


def _common(values: Values) -> dict[str, Any]:
    return {
        "hidden_size": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "intermediate_size": values["intermediate_size"],
        "vocab_size": values["vocab_size"],
        "seq_len": values["max_position_embeddings"],
    }


def _bert(values: Values) -> TransformerConfig:
    return TransformerConfig(
        **_common(values),
        position_tables=1,
        token_types=values.get("type_vocab_size", 2),
        post_norm=True,
        head="masked",
        activation=_activation(values, "hidden_act", "gelu"),
        tied=values.get("tie_word_embeddings", True),
    )


def _llama(values: Values, **more: Any) -> TransformerConfig:
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
    return TransformerConfig(**_common(values) | given | more)


def _qwen3(values: Values) -> TransformerConfig:
    return _llama(values, qk_norm=True, head_dim=values.get("head_dim") or 128)


def _mixtral(values: Values) -> TransformerConfig:
    experts = values["num_local_experts"]
    return _llama(values, num_experts=experts, top_k=values["num_experts_per_tok"])


def _qwen3_moe(values: Values) -> TransformerConfig:
    dense = values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1
    if dense:
        checks.fail("from_config", "mlp_only_layers", "empty: every layer sparse", dense)
    return _llama(
        values,
        qk_norm=True,
        head_dim=values.get("head_dim") or 128,
        num_experts=values["num_experts"],
        top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size"],
    )


_FAMILIES: dict[str, Callable[[Values], TransformerConfig]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
