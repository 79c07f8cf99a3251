"""``attn_implementation="fusedops"``: the attention of models that are not patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from causal_families import DENSE, IDS, SPARSE
from encoder_families import FAMILIES as ENCODERS
from patch_testing import assert_close, assert_same_training, counted
from torch import nn

import fusedops

# The first row is padded: on the right to train, on the left to generate.
RIGHT, LEFT = torch.ones_like(IDS), torch.ones_like(IDS)
RIGHT[0, -3:] = 0
LEFT[0, :3] = 0
CAUSAL = DENSE | SPARSE


def named_pair(family: Any, configured: str) -> tuple[nn.Module, nn.Module]:
    """Return a model that asks for ours by name, and one as it was configured."""
    fusedops.register_attention()
    return tuple(family.model(attn_implementation=name) for name in ("fusedops", configured))


def loss(model: Any) -> torch.Tensor:
    labels = IDS.masked_fill(RIGHT == 0, -100)
    return model(IDS, attention_mask=RIGHT, labels=labels).loss


# What sdpa cannot, soft-cap and sinks, is compared with eager.
@pytest.mark.parametrize(
    ("name", "configured"),
    [
        ("Llama", "sdpa"),
        ("Llama", "eager"),
        ("Mistral", "sdpa"),
        ("Gemma2", "eager"),
        ("GptOss", "eager"),
    ],
)
def test_training_with_padding_is_as_configured(name: str, configured: str) -> None:
    named, stock = named_pair(CAUSAL[name], configured)
    with counted() as calls:
        assert_same_training(named, stock, loss)
    assert calls["attention"] == 2


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_and_decoders_are_as_sdpa(name: str) -> None:
    family = ENCODERS[name]
    named, stock = named_pair(family, "sdpa")
    with counted() as calls:
        assert_same_training(named, stock, family.loss)
    assert calls["attention"] == family.ops["attention"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_left_padding_gives_the_same_tokens(cache: str) -> None:
    named, stock = (model.eval() for model in named_pair(DENSE["Mistral"], "sdpa"))
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    tokens, wanted = (
        model.generate(IDS, attention_mask=LEFT, pad_token_id=0, **options)
        for model in (named, stock)
    )
    assert torch.equal(tokens, wanted)


def test_a_model_that_asks_by_name_can_be_patched() -> None:
    _, stock = named_pair(DENSE["Llama"], "sdpa")
    named = copy.deepcopy(stock)
    named.set_attn_implementation("fusedops")
    report = fusedops.patch(named)
    assert report["model.layers.0.self_attn"].op is not None
    assert_same_training(named, stock, loss)
    fusedops.unpatch(named)
    assert named.config._attn_implementation == "fusedops"
    assert_close(named(IDS).logits, stock(IDS).logits)
