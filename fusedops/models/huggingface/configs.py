"""What a transformer is, from a configuration of transformers, and the other way.

Only what ``TransformerConfig`` describes exactly is taken; the tests compare each family's
parameters with those of the modules. Sizes and choices stand apart: the planner asks for sizes
alone, of models too whose choices nothing here computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.models.config import RopeScaling, TransformerConfig, describe

Values = Mapping[str, Any]
Entries = dict[str, tuple[str, Any]]  # by our field: name of the entry, and its default

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
        fields = _sizes(values, _FAMILIES[family])
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


_REQUIRED: Any = object()


def _required(**names: str) -> Entries:
    return {ours: (theirs, _REQUIRED) for ours, theirs in names.items()}


_TIED: Entries = {"tied": ("tie_word_embeddings", True)}
_GPT2_SIZES = _TIED | _required(
    hidden_size="n_embd",
    num_layers="n_layer",
    num_heads="n_head",
    vocab_size="vocab_size",
    seq_len="n_positions",
)
_GPT2_SIZES |= {
    "intermediate_size": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
}
_COMMON = _required(
    hidden_size="hidden_size",
    num_layers="num_hidden_layers",
    num_heads="num_attention_heads",
    intermediate_size="intermediate_size",
    seq_len="max_position_embeddings",
    vocab_size="vocab_size",
)
_BERT_SIZES = (
    _COMMON | _TIED | {"token_types": ("type_vocab_size", 2), "activation": ("hidden_act", "gelu")}
)
_LLAMA_SIZES = _COMMON | {
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "activation": ("hidden_act", "silu"),
    "tied": ("tie_word_embeddings", False),
}
_MISTRAL_SIZES = _LLAMA_SIZES | {"num_kv_heads": ("num_key_value_heads", 8)}
_QWEN3_SIZES = _LLAMA_SIZES | {
    "num_kv_heads": ("num_key_value_heads", 32),
    "head_dim": ("head_dim", 128),
}
_MIXTRAL_SIZES = _MISTRAL_SIZES | _required(
    num_experts="num_local_experts", top_k="num_experts_per_tok"
)
_QWEN3_MOE_SIZES = _LLAMA_SIZES | _required(
    num_experts="num_experts",
    top_k="num_experts_per_tok",
    intermediate_size="moe_intermediate_size",
)
_QWEN3_MOE_SIZES |= {"num_kv_heads": ("num_key_value_heads", 4)}
_LLAMA = {"rotary": True, "norm": "rms", "gated": True, "bias": False}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
# Fields whose entry may be null, which means its default.
_NULLABLE = ("activation", "head_dim", "intermediate_size")


@dataclass(frozen=True)
class _Family:
    """A family of transformers."""

    architecture: str  # the class of its models with a head
    # Fields on which sizes depend: name of the entry of each, and its default unless required
    sizes: Entries
    shared: dict[str, Any]  # fields with the same value in all models of the family
    choices: Entries  # other fields
    # Entries of which ``Transformer`` computes one value, with that value
    computed: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)  # the same, on which sizes depend
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
_LLAMA_CHOICES: Entries = _INITIALIZER | {
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
        _GPT2_SIZES,
        {"position_tables": 1},
        _GPT2_CHOICES | _INITIALIZER,
        computed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "bert": _Family(
        "BertForMaskedLM",
        _BERT_SIZES,
        {"position_tables": 1, "post_norm": True, "head": "masked"},
        _BERT_CHOICES | _INITIALIZER,
        computed={
            "is_decoder": False,
            "add_cross_attention": False,
            "position_embedding_type": "absolute",
        },
        causal=False,
    ),
    "llama": _Family("LlamaForCausalLM", _LLAMA_SIZES, _LLAMA, _LLAMA_CHOICES, checked=_NO_BIAS),
    "mistral": _Family(
        "MistralForCausalLM", _MISTRAL_SIZES, _LLAMA, _MISTRAL_CHOICES, checked=_NO_BIAS
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        _QWEN3_SIZES,
        _LLAMA | {"qk_norm": True},
        _LLAMA_CHOICES,
        {"use_sliding_window": False},
        _NO_BIAS,
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        _MIXTRAL_SIZES,
        _LLAMA,
        _MIXTRAL_CHOICES,
        {"router_jitter_noise": 0.0},
        _NO_BIAS,
        rope_theta=1e6,
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        _QWEN3_MOE_SIZES,
        _LLAMA | {"qk_norm": True},
        _MOE_CHOICES,
        {"use_sliding_window": False},
        _NO_BIAS | {"mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
}


def _sizes(values: Values, family: _Family) -> dict[str, Any]:
    """Return the fields on which sizes depend."""
    for name, expected in family.checked.items():
        if values.get(name) not in (None, expected):
            checks.fail("from_config", name, json.dumps(expected), checks.shown(values[name]))
    if family.architecture.startswith("Qwen3Moe") and "num_experts" not in values:
        # The name in files; objects of transformers 5.17 and newer have that of Mixtral.
        values = {**values, "num_experts": values["num_local_experts"]}
    fields = dict(family.shared)
    for ours, (theirs, default) in family.sizes.items():
        fields[ours] = values[theirs] if default is _REQUIRED else values.get(theirs, default)
        if fields[ours] is None and ours in _NULLABLE:
            fields[ours] = default
    if fields["intermediate_size"] is None:  # of GPT-2
        fields["intermediate_size"] = 4 * fields["hidden_size"]
    checks.choice("from_config", family.sizes["activation"][0], fields["activation"], _ACTIVATIONS)
    return fields | {"activation": _ACTIVATIONS[fields["activation"]]}


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
    name = _family(config)
    family, fields = _FAMILIES[name], describe(config)
    values = {theirs: fields[ours] for ours, (theirs, _) in (family.sizes | family.choices).items()}
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    values |= {
        family.sizes["activation"][0]: activations[config.activation],
        "model_type": name,
        "architectures": [family.architecture],
    }
    if name == "gpt2":
        values["embd_pdrop"] = config.dropout
    if "rotary" in family.shared:
        scaling = config.rope_scaling
        values |= {
            # Two entries that every version of transformers reads.
            "rope_theta": config.rope_theta,
            "rope_scaling": None if scaling is None else _to_scaling(scaling),
            "sliding_window": config.sliding_window,
            "intermediate_size": config.intermediate_size,  # also of dense layers of Qwen3-MoE
        }
    # What these entries leave out would come back as another model.
    restored = describe(replace(from_config(values), z_loss=config.z_loss))
    differ = [ours for ours, value in fields.items() if restored[ours] != value]
    if differ:
        raise checks.UnsupportedError(
            f"to_config: no family of transformers computes the same model: {name}, the nearest, "
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


def _to_scaling(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        **{name: getattr(scaling, name) for name in _SCALING_FACTORS},
        "original_max_position_embeddings": scaling.original_seq_len,
    }
