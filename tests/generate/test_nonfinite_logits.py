"""A model whose logits are NaN ends generation: an exception, the same one on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fusedops
from fusedops.cli.main import app
from fusedops.generation import NonFiniteLogitsError, stream
from fusedops.models import (
    TINY,
    ParallelConfig,
    Transformer,
    parallelize,
    save_huggingface,
)
from fusedops.testing import threads

BROKEN = 123  # the word whose embedding is not finite: what follows it is not
PROMPTS = [[5, 17, 3], [7, 8], [200, BROKEN, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "samples": 2},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9},
    {"beams": 3},
)


def damage(model: Transformer, value: float) -> Transformer:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "embedding.tokens.weight":
                parameter[BROKEN] = value
    return model


@pytest.fixture
def model() -> Transformer:
    return Transformer(replace(TINY["tiny-llama"], initializer_range=0.1)).eval()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", CALLS, ids=lambda each: "-".join(each) or "greedy")
def test_the_error_names_prompt_and_position(
    options: dict[str, Any], value: float, model: Transformer
) -> None:
    damage(model, value)
    with pytest.raises(NonFiniteLogitsError, match="for prompt 2 at position 4") as caught:
        fusedops.generate(model, PROMPTS, tokens=5, **options)
    assert (caught.value.prompt, caught.value.position) == (2, 4)


def test_tokens_come_until_one_cannot_be_chosen(model: Transformer) -> None:
    expected = fusedops.generate(model, PROMPTS[0], tokens=6)[0].tokens
    # What follows a word that the model writes itself is not finite.
    with torch.no_grad():
        model.embedding.tokens.weight[expected[3]] = float("nan")
    first = expected.index(expected[3])
    tokens = []
    with pytest.raises(NonFiniteLogitsError, match=f"at position {3 + first + 1} "):
        for each in stream(model, PROMPTS[0], tokens=6):
            tokens.append(each.token)
    assert tokens == expected[: first + 1]
    # A sequence that ends with that word goes on with no token.
    found = fusedops.generate(model, [PROMPTS[0], [7]], tokens=6, stop=[expected[3]])
    assert found[0].tokens == expected[: first + 1] and found[0].reason == "stop"
    assert len(found[1].tokens) == 6


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ({"tp": 2}, "prompt 0 at position 3"),
        ({"pp": 2}, "prompt 0 at position 3"),
        ({"dp": 2}, "prompt 2 at position 4"),
        ({"cp": 2}, "prompt 2 at position 4"),
    ],
    ids=["tp", "pp", "dp", "cp"],
)
def test_all_ranks_raise_what_one_of_them_meets(layout: dict[str, int], where: str) -> None:
    def on_rank(rank: int) -> list[str]:
        whole = Transformer(replace(TINY["tiny-llama"], initializer_range=0.1), device="meta")
        engine = parallelize(whole, ParallelConfig(**layout), seed=0)
        if rank == 1:
            parameter: Any = dict(whole.named_parameters())["head.weight"].detach()
            getattr(parameter, "_local_tensor", parameter)[0] = float("nan")
        messages = []
        for options in CALLS:
            with pytest.raises(NonFiniteLogitsError) as caught:
                fusedops.generate(engine, PROMPTS, tokens=3, **options)
            messages.append(str(caught.value))
        return messages

    first, second = threads.run(on_rank, 2)
    assert first == second and all(where in each for each in first), first


def test_the_command_exits_with_1(model: Transformer, tmp_path: Path) -> None:
    save_huggingface(damage(model, float("nan")), tmp_path)
    prompts = ["--prompt", "ab", "--prompt", f"a{chr(BROKEN)}c"]
    for more in ([], ["--temperature", "1"], ["--beams", "2"]):
        done = CliRunner().invoke(
            app, ["generate", str(tmp_path), "--tokenizer", "bytes", *prompts, *more]
        )
        *_, last = done.stderr.splitlines()
        assert done.exit_code == 1 and not done.stdout, done.output
        assert last.startswith("fusedops: error: ") and "for prompt 1 at position 3" in last
