"""The sizes of a transformer from a configuration of transformers."""

from __future__ import annotations

from typing import Any

from fusedops import models
from fusedops.models import TransformerConfig


def from_config(config: Any) -> TransformerConfig:
    """Return the sizes of a model that transformers builds.

    Args:
        config: a configuration, what its ``to_dict`` gives, or the path of a ``config.json``.

    Returns:
        Sizes; what they do not depend on is left at its default.

    Raises:
        ValueError: the family is none of those that are known, a size is missing, or the file is no
            configuration.
        TypeError: it is none of these.

    Example:
        >>> from fusedops.planner import from_config
        >>> small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
        >>> from_config(small | {"vocab_size": 512, "n_positions": 128}).parameters().total
        141056
    """
    return models.from_config(config, sizes_only=True)
