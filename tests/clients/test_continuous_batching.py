"""transformers' continuous batching with patched models: the paged cache is kept by their sdpa."""

from __future__ import annotations

from typing import Any

import pytest
from causal_families import DENSE
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import fusedops

PROMPTS = [[5, 6, 7], [9, 3, 4, 1, 2]]


def generated(model: Any) -> list[list[int]]:
    """Return the tokens of all requests, by prompt."""
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64),
    )
    assert all(each.error is None and each.status.name == "FINISHED" for each in outputs.values())
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_patched_model_generates_the_same(implementation: str) -> None:
    model = DENSE["Llama"].model(attn_implementation=implementation).eval()
    expected = generated(model)
    assert all(len(tokens) == 6 for tokens in expected)
    fusedops.patch(model)
    assert generated(model) == expected
