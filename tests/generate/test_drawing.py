"""Draws have the probabilities that were asked for, and each sequence has a stream of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedops
from fusedops._core import philox
from fusedops.generation import Options
from fusedops.generation.sampling import Sampler, draw, uniforms
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


def test_draws_are_words_of_philox_at_their_position() -> None:
    seed, prompt, sample, first = (7 << 32) + 9, 5, 2, (1 << 32) - 1
    found = uniforms(torch.tensor([[seed, prompt, sample]]), torch.tensor([first]), 2)[0]
    for position, each in zip((first, first + 1), found.tolist(), strict=True):
        words = position & 0xFFFFFFFF, position >> 32, sample, prompt
        counter = [torch.tensor(word) for word in words]
        key = torch.tensor(9), torch.tensor(7)
        high, low, *_ = philox.philox4x32((*counter,), key)  # type: ignore[arg-type]
        assert each == ((int(high) << 32) + int(low) >> 11) / 2**53


def test_a_long_sequence_draws_at_each_of_its_positions() -> None:
    """Numbers of 256 positions are drawn at once."""
    options, stream, logits = Options(temperature=1.0), (1, 2, 3), torch.zeros(1, 1 << 12)
    sampler = Sampler(options, [torch.arange(5)], [stream], 1 << 12, logits.device)
    draws = uniforms(torch.tensor([stream]), torch.tensor([5]), 300)
    for position in range(300):
        expected = draw(logits, draws[:, position], options)
        assert torch.equal(sampler.sample(logits), expected), position


def test_what_else_is_in_the_batch_changes_no_draw(model: Transformer) -> None:
    def texts(prompts: Any, **more: Any) -> list[list[int]]:
        options: dict[str, Any] = {"tokens": 20, "samples": 3} | DRAWN | more
        return [each.tokens for each in fusedops.generate(model, prompts, **options)]

    together = texts(PROMPTS)
    assert len(set(map(tuple, together))) == 9
    for number, prompt in enumerate(PROMPTS):
        others: list[list[int]] = [[9], [8] * 11, [1, 2, 3, 4]]
        others[number] = prompt
        assert texts(others)[3 * number : 3 * number + 3] == together[3 * number : 3 * number + 3]
    alone = texts(PROMPTS[0])
    assert alone == together[:3]
    assert texts(PROMPTS[0], samples=1) == alone[:1]
    assert texts(PROMPTS[0], seed=4) != alone
    # With a seed of its own a prompt has the text that it has alone, wherever it stands.
    seeds = texts([*PROMPTS, PROMPTS[0], PROMPTS[0]], seed=[8, 9, 10, 4, DRAWN["seed"]])
    assert seeds[9:12] == texts(PROMPTS[0], seed=4) and seeds[12:] == alone
    assert seeds[3:6] == texts(PROMPTS[1], seed=9)


def test_a_sequence_that_is_gone_on_with_is_what_it_would_have_been(model: Transformer) -> None:
    whole = fusedops.generate(model, PROMPTS[0], tokens=20, **DRAWN)[0].tokens
    rest = fusedops.generate(model, PROMPTS[0] + whole[:8], tokens=12, **DRAWN)[0].tokens
    assert rest == whole[8:]


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
