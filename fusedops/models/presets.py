"""Published models by name, and tiny ones for tests: ``presets.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedops._core.spelling import nearest
from fusedops.models.config import TransformerConfig
from fusedops.models.rotary import RopeScaling

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Of tiny models, whatever their family: all sizes are even, and words are bytes.
_TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_size": 256,
    "seq_len": 64,
}
_TINY |= {"dropout": 0.0, "attention_dropout": 0.0}


def _family(name: str) -> dict[str, Any]:
    """Return the fields of a family, with those of the family that it extends."""
    fields = dict(_TABLES["families"][name])
    base = fields.pop("extends", None)
    return fields if base is None else _family(base) | fields


def _model(row: Mapping[str, Any]) -> TransformerConfig:
    given = dict(row)
    fields = _family(given.pop("family")) | given
    fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
    if "rope_scaling" in fields:
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    return TransformerConfig(**fields)


PRESETS: dict[str, TransformerConfig] = {
    name: _model(row) for name, row in _TABLES["models"].items()
}
TINY: dict[str, TransformerConfig] = {
    name: _model(_TINY | row) for name, row in _TABLES["tiny"].items()
}


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
        # A name less like another than this is no slip of the keyboard, and has no suggestion.
        near = nearest(name.lower(), [*PRESETS, *TINY], cutoff=0.65)
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(f"unknown model {name!r}: {hint}known: {', '.join(PRESETS)}")
    return config
