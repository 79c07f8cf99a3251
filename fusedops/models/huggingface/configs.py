"""What a transformer is, from a configuration of transformers, and the other way.

Only what ``TransformerConfig`` describes exactly is taken; the tests compare each family's
parameters with those of the modules. Sizes and choices stand apart: the planner asks for sizes
alone, of models too whose choices nothing here computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
_SCALING_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


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
    values = config_values(config)
    family = values.get("model_type")
    checks.choice("from_config", "model_type", family, _FAMILIES)
    assert isinstance(family, str)
    try:
        fields = _FAMILIES[family].sizes(values)
        if not sizes_only:
            fields |= _choices(values, family, has_rotations="rotary" in fields)
        return TransformerConfig(**fields)
    except KeyError as error:
        raise ValueError(f"from_config: the configuration has no {error.args[0]}") from None


def config_values(config: Any) -> Values:
    """Return the entries of what ``from_config`` takes."""
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


def _llama(values: Values, *, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            checks.fail("from_config", name, "false", values[name])
    given = {
        "num_kv_heads": values.get("num_key_value_heads", kv_heads),
        "head_dim": values.get("head_dim"),
        "rotary": True,
        "norm": "rms",
        "gated": True,
        "activation": _activation(values, "hidden_act", "silu"),
        "bias": False,
        "tied": values.get("tie_word_embeddings", False),
    }
    return _common(values) | given | more


def _mistral(values: Values) -> dict[str, Any]:
    return _llama(values, kv_heads=8)


def _qwen3(values: Values) -> dict[str, Any]:
    return _llama(values, kv_heads=32, qk_norm=True, head_dim=values.get("head_dim") or 128)


def _mixtral(values: Values) -> dict[str, Any]:
    experts = values["num_local_experts"]
    return _llama(values, kv_heads=8, num_experts=experts, top_k=values["num_experts_per_tok"])


def _qwen3_moe(values: Values) -> dict[str, Any]:
    dense = values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1
    if dense:
        checks.fail("from_config", "mlp_only_layers", "empty: every layer sparse", dense)
    # Its name in files, and from transformers 5.17 on in objects.
    name = "num_experts" if "num_experts" in values else "num_local_experts"
    return _llama(
        values,
        kv_heads=4,
        qk_norm=True,
        num_experts=values[name],
        top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size"],
    )


@dataclass(frozen=True)
class _Family:
    """A family of transformers."""

    architecture: str  # the class of its models with a head
    sizes: Callable[[Values], dict[str, Any]]  # reads the fields that sizes depend on
    # Other fields that are read and written: name and default of the entry of each
    choices: dict[str, tuple[str, Any]]
    # Entries of which ``Transformer`` computes one value, with that value
    computed: dict[str, Any] = field(default_factory=dict)
    causal: bool = True  # whether a token attends only itself and what is before it
    rope_theta: float = 10000.0  # where the configuration has none


_INITIALIZER = {"initializer_range": ("initializer_range", 0.02)}
_GPT2_CHOICES = {
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
}
_BERT_CHOICES = {
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "pad_token_id": ("pad_token_id", 0),
}
_LLAMA_CHOICES: dict[str, tuple[str, Any]] = _INITIALIZER | {
    "norm_eps": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "pad_token_id": ("pad_token_id", None),
}
_MISTRAL_CHOICES = _LLAMA_CHOICES | {"sliding_window": ("sliding_window", 4096)}
_BALANCE = {"balance_loss": ("router_aux_loss_coef", 0.001)}
_MIXTRAL_CHOICES = (
    _LLAMA_CHOICES
    | _BALANCE
    | {"norm_eps": ("rms_norm_eps", 1e-5), "sliding_window": ("sliding_window", None)}
)
_MOE_CHOICES = _LLAMA_CHOICES | _BALANCE | {"router_normalize": ("norm_topk_prob", False)}
_FAMILIES = {
    "gpt2": _Family(
        "GPT2LMHeadModel",
        _gpt2,
        _GPT2_CHOICES | _INITIALIZER,
        computed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "bert": _Family(
        "BertForMaskedLM",
        _bert,
        _BERT_CHOICES | _INITIALIZER,
        computed={
            "is_decoder": False,
            "add_cross_attention": False,
            "position_embedding_type": "absolute",
        },
        causal=False,
    ),
    "llama": _Family("LlamaForCausalLM", _llama, _LLAMA_CHOICES),
    "mistral": _Family("MistralForCausalLM", _mistral, _MISTRAL_CHOICES),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen3, _LLAMA_CHOICES, {"use_sliding_window": False}),
    "mixtral": _Family(
        "MixtralForCausalLM",
        _mixtral,
        _MIXTRAL_CHOICES,
        {"router_jitter_noise": 0.0},
        rope_theta=1e6,
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", _qwen3_moe, _MOE_CHOICES, {"use_sliding_window": False}
    ),
}


def _choices(values: Values, family: str, *, has_rotations: bool) -> dict[str, Any]:
    """Return the fields that no size depends on; raise for what is not computed here."""
    entries = _FAMILIES[family]
    choices = {ours: values.get(*entry) for ours, entry in entries.choices.items()}
    computed = entries.computed | {"quantization_config": None}
    if family == "gpt2":  # two entries of one dropout
        computed["embd_pdrop"] = choices["dropout"]
    for name, expected in computed.items():
        given = values.get(name, 0.1 if name == "embd_pdrop" else expected)
        if given != expected:
            checks.fail("from_config", name, repr(expected), checks.shown(given))
    padding = choices.get("pad_token_id")
    if padding is not None and padding < 0:  # from the end, as torch.nn.Embedding counts
        choices["pad_token_id"] = padding + values["vocab_size"]
    rotations = _rotations(values, entries.rope_theta) if has_rotations else {}
    return choices | rotations | {"causal": entries.causal}


def _rotations(values: Values, default_theta: float) -> dict[str, Any]:
    """Return the rotations, as transformers 5 writes them or in the two entries before that."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        checks.fail("from_config", "rope_parameters", "a table or null", checks.shown(given))
    theta = given.get("rope_theta") or values.get("rope_theta") or default_theta
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rope_theta": float(theta)}
    if kind != "llama3":
        checks.fail("from_config", "rope_type", "'default' or 'llama3'", checks.shown(kind))
    scaling = RopeScaling(
        **{name: float(given[name]) for name in _SCALING_FACTORS},
        original_seq_len=given["original_max_position_embeddings"],
    )
    return {"rope_theta": float(theta), "rope_scaling": scaling}


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
    choices = {
        theirs: getattr(config, ours) for ours, (theirs, _) in _FAMILIES[family].choices.items()
    }
    values = {
        **{"gpt2": _to_gpt2, "bert": _to_bert}.get(family, _to_llama)(config),
        **choices,
        "model_type": family,
        "architectures": [_FAMILIES[family].architecture],
        "vocab_size": config.vocab_size,
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
        "embd_pdrop": config.dropout,
    }


def _to_common(config: TransformerConfig) -> dict[str, Any]:
    sizes = {theirs: getattr(config, ours) for ours, theirs in _COMMON.items()}
    return sizes | {"hidden_act": _name_of(config)}


def _to_bert(config: TransformerConfig) -> dict[str, Any]:
    return _to_common(config) | {"type_vocab_size": config.token_types}


def _to_llama(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    values = _to_common(config) | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.size_of_head,
        # Two entries that every version of transformers reads.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _to_scaling(scaling),
        "sliding_window": config.sliding_window,
    }
    if not config.num_experts:
        return values
    values["num_experts_per_tok"] = config.top_k
    if not config.qk_norm:
        return values | {"num_local_experts": config.num_experts}
    sizes = {"num_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size}
    return values | sizes


def _to_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        **{name: getattr(scaling, name) for name in _SCALING_FACTORS},
        "original_max_position_embeddings": scaling.original_seq_len,
    }
