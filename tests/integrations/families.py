"""What the families of transformers' models share: sizes that run in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = LAYERS | {"vocab_size": 97}


def build(
    name: str, config: str, options: dict[str, Any], *, seed: int = 0, varied: Sequence[str]
) -> nn.Module:
    """Return a model in training, the same at every call.

    ``varied`` are parts of the names of the parameters and buffers that are not left ones and
    zeros, which hide for which of two modules a weight was.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).train()
    with torch.no_grad():
        for key, each in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in key.lower() for part in varied):
                each.add_(torch.randn_like(each), alpha=0.1)
    return model
