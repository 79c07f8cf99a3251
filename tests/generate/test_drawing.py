"""Draws have the probabilities that were asked for, and depend on seed, sample and place alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import philox
from fusedops.generation import Options
from fusedops.generation.sampling import draw, uniforms
from fusedops.models import TINY, Transformer, save_huggingface

PROMPTS = [[5, 17, 3], [7], [200, 1, 1, 30, 8]]
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "seed": 3}


@pytest.fixture
def model() -> Transformer:
    return Transformer(replace(TINY["tiny-llama"], initializer_range=0.1)).eval()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 1e-9},
    ],
    ids=lambda each: "-".join(each),
)
def test_draws_have_the_probabilities_of_transformers(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 24) * 2
    expected = transformers.TemperatureLogitsWarper(options["temperature"])(None, logits)
    if "top_k" in options:
        expected = transformers.TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = transformers.TopPLogitsWarper(options["top_p"])(None, expected)
    count = 20000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(logits.expand(count, -1), grid, Options(**options))
    found = tokens.bincount(minlength=24)
    # Of an even grid the share of each token is its probability, up to one point at each end.
    assert (found - expected.softmax(-1)[0].double() * count).abs().max() <= 2
    assert not found[expected[0] == -torch.inf].any()


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-46])
def test_a_temperature_next_to_zero_draws_the_likeliest(temperature: float) -> None:
    logits = torch.randn(64, 24) * 20
    grid = torch.arange(64, dtype=torch.float64) / 64
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}):
        tokens = draw(logits, grid, Options(temperature=temperature, **options))  # type: ignore[arg-type]
        assert torch.equal(tokens, logits.argmax(-1)), options


def test_draws_are_words_of_philox_at_their_place() -> None:
    seed, sample, first = (7 << 32) + 9, 2, (1 << 32) - 1
    found = uniforms([(seed, sample)], [first], 2, torch.device("cpu"))[0]
    for place, each in zip((first, first + 1), found.tolist(), strict=True):
        counter = [torch.tensor(n) for n in (place & 0xFFFFFFFF, place >> 32, sample, 0)]
        key = torch.tensor(9), torch.tensor(7)
        high, low, *_ = philox.philox4x32((*counter,), key)  # type: ignore[arg-type]
        assert each == ((int(high) << 32) + int(low) >> 11) / 2**53
    many = uniforms([(each, 0) for each in range(64)], [0] * 64, 256, torch.device("cpu"))
    assert many.min() >= 0 and many.max() < 1 and len(many.unique()) == many.numel()
    # Of so many the mean's standard deviation is 0.0023.
    assert abs(float(many.mean()) - 0.5) < 0.01


def test_what_else_is_in_the_batch_changes_no_draw(model: Transformer) -> None:
    together = fusedops.generate(model, PROMPTS, tokens=20, samples=3, **DRAWN)
    assert len({tuple(each.tokens) for each in together}) == 9
    for number, prompt in enumerate(PROMPTS):
        alone = fusedops.generate(model, prompt, tokens=20, samples=3, **DRAWN)
        mine = together[3 * number : 3 * number + 3]
        assert [each.tokens for each in alone] == [each.tokens for each in mine]
    fewer = fusedops.generate(model, PROMPTS[0], tokens=20, **DRAWN)
    assert fewer[0].tokens == together[0].tokens
    other = fusedops.generate(model, PROMPTS[0], tokens=20, **DRAWN | {"seed": 4})
    assert other[0].tokens != together[0].tokens
    seeds = fusedops.generate(model, [PROMPTS[0]] * 2, tokens=20, **DRAWN | {"seed": [3, 4]})
    assert [each.tokens for each in seeds] == [together[0].tokens, other[0].tokens]


def test_a_sequence_that_is_gone_on_with_is_what_it_would_have_been(model: Transformer) -> None:
    whole = fusedops.generate(model, PROMPTS[0], tokens=20, **DRAWN)[0].tokens
    rest = fusedops.generate(model, PROMPTS[0] + whole[:8], tokens=12, **DRAWN)[0].tokens
    assert rest == whole[8:]


def test_rows_that_are_done_change_no_other(model: Transformer) -> None:
    lengths = [2, 30, 3, 4]
    prompts = [*PROMPTS, [9, 9]]
    whole = fusedops.generate(model, prompts, tokens=30, repetition_penalty=1.2, **DRAWN)
    found = fusedops.generate(
        model,
        prompts,
        tokens=30,
        repetition_penalty=1.2,
        until=lambda number, made: len(made) == lengths[number],
        **DRAWN,
    )
    for each, all_, length in zip(found, whole, lengths, strict=True):
        assert each.tokens == all_.tokens[:length]


def test_repetition_penalty_is_that_of_transformers(model: Transformer, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    save_huggingface(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    found = fusedops.generate(model, PROMPTS[0], tokens=30, repetition_penalty=1.5)[0].tokens
    expected = theirs.generate(
        torch.tensor([PROMPTS[0]]),
        max_new_tokens=30,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=None,
    )
    assert found == expected[0, 3:].tolist()
    assert found != fusedops.generate(model, PROMPTS[0], tokens=30)[0].tokens
