"""Small transformers of this package for ``verify``, by functions that processes can have too.

Nothing in them depends on how a batch is cut: no capacity of experts, which each rank would fill
for itself, and no balance loss, which is no sum over micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusedops.models import Transformer, preset


def small(name: str, **more: Any) -> Transformer:
    """Return a preset's kind of model, as small as it gets with two layers and four heads."""
    config = preset(name)
    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "intermediate_size": 24,
        "vocab_size": 19,
        "seq_len": 64,
        "dropout": 0.2,
        "attention_dropout": 0.2,
    }
    if config.num_kv_heads not in (None, config.num_heads):
        given["num_kv_heads"] = 2
    if config.head_dim:
        given["head_dim"] = 8
    if config.num_experts:
        given |= {"num_experts": 4, "capacity_factor": None, "balance_loss": 0.0, "z_loss": 0.01}
    return Transformer(replace(config, **given | more))


def gpt2() -> Transformer:
    return small("tiny-gpt2")


def llama() -> Transformer:
    return small("tiny-llama")


def bert() -> Transformer:
    return small("tiny-bert")


def mixtral() -> Transformer:
    return small("tiny-mixtral")


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "mixtral": mixtral}
