"""What a transformer is, from a configuration of transformers, and the other way.

Only what ``TransformerConfig`` describes exactly is taken; the tests compare each family's
parameters with those of the modules. The planner asks for sizes alone, of models too whose choices
nothing here computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusedops._core import checks
from fusedops.models.config import TransformerConfig, describe
from fusedops.models.huggingface.families import FAMILIES, Family
from fusedops.models.rotary import KINDS, RopeScaling

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
# transformers' names of fields of stretched rotations that it calls otherwise.
_SCALING = {
    "original_seq_len": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
# Fields whose entry may be null, which means its default.
_NULLABLE = ("activation", "head_dim", "intermediate_size")
# Fields on which no size depends.
_CHOICES = (
    *("norm_eps", "dropout", "attention_dropout", "pad_token_id", "initializer_range"),
    *("sliding_window", "balance_loss", "router_normalize"),
)
# Computed entries on which sizes depend.
_SIZING = ("attention_bias", "mlp_bias", "mlp_only_layers", "decoder_sparse_step")


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
    name: Any = values.get("model_type")
    checks.choice("from_config", "model_type", name, FAMILIES)
    try:
        if name == "qwen3_moe" and "num_experts" not in values:
            # The name in files; objects of transformers 5.17 and newer have that of Mixtral.
            values = {**values, "num_experts": values["num_local_experts"]}
        return TransformerConfig(**_fields(values, FAMILIES[name], sizes_only=sizes_only))
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


def _fields(values: Values, family: Family, *, sizes_only: bool) -> dict[str, Any]:
    """Return the fields of a model; raise for entries that ``Transformer`` does not compute."""
    computed = {"quantization_config": None, **family.computed}
    if family.architecture == "GPT2LMHeadModel":  # it has two entries of one dropout
        values = {"embd_pdrop": 0.1, **values}
        computed["embd_pdrop"] = values.get("resid_pdrop", 0.1)
    for name, expected in computed.items():
        given = values.get(name, expected)
        is_same = given == expected or not (given or expected)  # null is false, zero or nothing
        if not is_same and (name in _SIZING or not sizes_only):
            checks.fail("from_config", name, json.dumps(expected), checks.shown(given))
    fields = dict(family.shared)
    for ours, entry in family.entries.items():
        fields[ours] = values[entry] if isinstance(entry, str) else values.get(*entry)
        if fields[ours] is None and ours in _NULLABLE and not isinstance(entry, str):
            fields[ours] = entry[1]
    if fields["intermediate_size"] is None and "n_inner" in family.entries["intermediate_size"]:
        fields["intermediate_size"] = 4 * fields["hidden_size"]
    fields = family.read_fields(fields)
    entry = family.entries["activation"][0]
    checks.choice("from_config", entry, fields["activation"], _ACTIVATIONS)
    fields["activation"] = _ACTIVATIONS[fields["activation"]]
    if sizes_only:
        return {name: value for name, value in fields.items() if name not in _CHOICES}
    padding = fields.get("pad_token_id")
    if padding is not None and padding < 0:  # from the end, as torch.nn.Embedding counts
        fields["pad_token_id"] = padding + fields["vocab_size"]
    return fields | (_rotations(values, family.rope_theta) if "rotary" in fields else {})


def _rotations(values: Values, default_theta: float) -> dict[str, Any]:
    """Return the rotations, as transformers 5 writes them or in the two entries before that."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        checks.fail("from_config", "rope_parameters", "a table or null", checks.shown(given))
    theta = given.get("rope_theta") or values.get("rope_theta") or default_theta
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rope_theta": float(theta)}
    checks.choice("from_config", "rope_type", kind, ("default", *KINDS))
    if given.get("partial_rotary_factor") not in (None, 1):
        got = given["partial_rotary_factor"]
        checks.fail("from_config", "partial_rotary_factor", "1, or left out", got)
    original, length = "original_max_position_embeddings", values["max_position_embeddings"]
    fields = {name: value for name, value in given.items() if value is not None}
    fields[original] = values.get(original) or fields.get(original) or length
    if kind in ("yarn", "longrope"):
        fields.setdefault("factor", length / fields[original])
    scaling = {name: fields[entry] for name, entry in _entries(kind) if entry in fields}
    for required in ("factor", "low_freq_factor", "high_freq_factor"):
        if required in KINDS[kind] and required not in scaling:
            raise KeyError(required)
    return {"rope_theta": float(theta), "rope_scaling": RopeScaling(kind=kind, **scaling)}


def _entries(kind: str) -> list[tuple[str, str]]:
    """Return the fields of a kind of stretched rotations, with their names in transformers."""
    return [(name, _SCALING.get(name, name)) for name in KINDS[kind]]


def to_config(config: TransformerConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds for the family of transformers that computes the same.

    Args:
        config: of a model.

    Returns:
        The entries, ``model_type`` and ``architectures`` among them; ``from_config`` reads them as
        the same ``config``, but for what transformers has no word for: the z-loss, and of
        DeepSeek-V3 the balance loss and the rate of the balancing bias.

    Raises:
        UnsupportedError: no family of transformers computes the same.
    """
    name = _family(config)
    family, fields = FAMILIES[name], describe(config)
    values = {
        entry if isinstance(entry, str) else entry[0]: fields[ours]
        for ours, entry in family.entries.items()
    }
    values = family.write_entries(values)
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    values |= {
        family.entries["activation"][0]: activations[config.activation],
        "model_type": name,
        "architectures": [family.architecture],
    }
    if name == "gpt2":
        values["embd_pdrop"] = config.dropout
    if "rotary" in family.shared:
        scaling, stretch = None, config.rope_scaling
        if stretch is not None:
            entries = {entry: getattr(stretch, name) for name, entry in _entries(stretch.kind)}
            given = {entry: value for entry, value in entries.items() if value is not None}
            scaling = {"rope_type": stretch.kind, **given}
        values |= {
            # Two entries that every version of transformers reads.
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
            "sliding_window": config.sliding_window,
            "intermediate_size": config.intermediate_size,  # also of dense layers of Qwen3-MoE
        }
    # What these entries leave out would come back as another model.
    read = from_config(values)
    unwritten: dict[str, Any] = {"z_loss": config.z_loss}
    if "balance_loss" not in family.entries:
        unwritten["balance_loss"] = config.balance_loss
    if read.balance_rate and config.balance_rate:  # whether there is a bias is what is written
        unwritten["balance_rate"] = config.balance_rate
    restored = describe(replace(read, **unwritten))
    differ = [ours for ours, value in fields.items() if restored[ours] != value]
    if differ:
        raise checks.UnsupportedError(
            f"to_config: no family of transformers computes the same model: {name}, the nearest, "
            f"does not have its {', '.join(differ)}"
        )
    return values


def _family(config: TransformerConfig) -> str:
    if config.is_latent:
        return "deepseek_v3"
    if config.norm == "layer":
        return "bert" if config.head == "masked" else "gpt2"
    if config.num_experts:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.qk_norm:
        return "qwen3"
    return "llama" if config.sliding_window is None else "mistral"
