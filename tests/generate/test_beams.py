"""Beam search finds the sequences and scores of transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedops
from fusedops.models import TINY, Transformer, save_huggingface

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 17, 3], [7], [200, 1, 1, 30, 8]]
TOKENS = 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> tuple[Transformer, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("beams")
    ours = Transformer(replace(TINY["tiny-llama"], initializer_range=0.1)).eval()
    save_huggingface(ours, folder)
    return ours, transformers.AutoModelForCausalLM.from_pretrained(Path(folder))


@pytest.mark.parametrize(
    ("length_penalty", "stops"), [(1.0, 0), (1.0, 1), (1.0, 6), (0.0, 6), (2.0, 6), (-1.0, 6)]
)
def test_beams_are_those_of_transformers(
    models: tuple[Transformer, Any], length_penalty: float, stops: int
) -> None:
    ours, theirs = models
    # Words that come often, so that beams do end.
    seen = [each.tokens for each in fusedops.generate(ours, PROMPTS, tokens=TOKENS, beams=4)]
    stop = sorted({token for tokens in seen for token in tokens[3:]})[:stops]
    penalty = 1.2 if stops == 1 else 1.0
    found = fusedops.generate(
        ours,
        PROMPTS,
        tokens=TOKENS,
        beams=4,
        length_penalty=length_penalty,
        stop=stop,
        repetition_penalty=penalty,
    )
    for prompt, each in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            num_beams=4,
            do_sample=False,
            length_penalty=length_penalty,
            eos_token_id=stop or None,
            pad_token_id=0,
            repetition_penalty=penalty,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = expected.sequences[0, len(prompt) :].tolist()
        assert tokens[: len(each.tokens)] == each.tokens
        assert not any(tokens[len(each.tokens) :])
        torch.testing.assert_close(torch.tensor(each.score), expected.sequences_scores[0])
        assert each.reason == ("stop" if each.tokens[-1] in stop else "length")
    if stops == 6:
        assert {each.reason for each in found} == {"stop"} or length_penalty > 0


def test_a_beam_alone_is_greedy_and_more_are_no_less_likely(
    models: tuple[Transformer, Any],
) -> None:
    ours, _ = models
    wide = fusedops.generate(ours, PROMPTS, tokens=TOKENS, beams=8, length_penalty=0.0)
    greedy = fusedops.generate(ours, PROMPTS, tokens=TOKENS)
    for prompt, each, plain in zip(PROMPTS, wide, greedy, strict=True):

        def likelihood(tokens: list[int], prompt: list[int] = prompt) -> float:
            with torch.no_grad():
                logits = ours(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
            return float(chosen.sum())

        torch.testing.assert_close(torch.tensor(each.score), torch.tensor(likelihood(each.tokens)))
        assert likelihood(each.tokens) >= likelihood(plain.tokens)


def test_beams_that_every_word_ends_have_one_token(models: tuple[Transformer, Any]) -> None:
    ours, _ = models
    found = fusedops.generate(ours, PROMPTS, tokens=TOKENS, beams=2, stop=range(256))
    greedy = fusedops.generate(ours, PROMPTS, tokens=1)
    assert [(each.tokens, each.reason) for each in found] == [(g.tokens, "stop") for g in greedy]
