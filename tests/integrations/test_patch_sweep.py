"""A patched model follows every change of what its forward reads, one model type at a time."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import pytest
from encoder_families import VISION
from patch_sweep import ModelType, listing, sweep
from torch import nn

import fusedops

pytest.importorskip("transformers")

FIRST = ("causal llama", "causal gpt2", "causal gpt_oss", "masked bert")
AT_A_PUSH = (
    *("causal gemma2", "causal bloom", "causal mixtral", "masked distilbert", "seq2seq t5"),
    "image vit",
)
# In the slow tier.
OTHERS = (
    *("causal llama eager", "causal gemma", "causal gemma3_text", "causal mistral"),
    *("causal qwen2", "causal qwen3", "causal phi", "causal phi3", "causal gpt_neox"),
    *("causal opt", "causal gptj", "causal gpt_neo", "causal codegen", "causal falcon"),
    *("causal cohere", "causal cohere2", "causal olmo", "causal olmo2", "causal granite"),
    *("causal granitemoe", "causal smollm3", "causal starcoder2", "causal stablelm"),
    *("causal nemotron", "causal helium", "causal glm", "causal qwen2_moe"),
    *("causal qwen3_moe", "causal olmoe", "causal deepseek_v3", "causal mpt"),
    *("causal persimmon", "causal xglm", "causal biogpt", "causal openai-gpt", "causal ctrl"),
    *("masked bert eager", "masked roberta", "masked electra", "masked albert"),
    *("masked deberta", "masked deberta-v2", "masked mpnet", "masked modernbert"),
    *("masked squeezebert", "masked rembert", "masked xlm", "masked esm", "masked layoutlm"),
    *("seq2seq bart", "seq2seq mbart", "seq2seq pegasus", "seq2seq m2m_100"),
    *("seq2seq marian", "seq2seq mt5", "seq2seq switch_transformers", "seq2seq umt5"),
    *("seq2seq blenderbot", "image beit", "image clip", "image siglip"),
    *("image dinov2", "image convnext", "image swin", "image swinv2", "image vit_msn"),
    *("image ijepa", "image segformer", "speech whisper"),
)
STAGES = {"depths": [1, 2], "num_heads": [2, 4]}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v3": {"num_key_value_heads": 4},
    "convnext": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "segformer": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "swin": {"image_size": 32, "window_size": 4, "embed_dim": 16} | STAGES,
    "swinv2": {"image_size": 32, "window_size": 4, "embed_dim": 16} | STAGES,
    "clip": {"vision_config": VISION},
    "siglip": {"vision_config": VISION},
    "esm": {"vocab_size": 97, "pad_token_id": 1, "mask_token_id": 2, "token_dropout": False},
}


def kind_of(name: str) -> ModelType:
    """Return the type of ``"<task> <name>"``, with its eager attention after a third word."""
    task, model, *implementation = name.split()
    options = dict(OPTIONS.get(model, {}))
    if implementation:
        options["attn_implementation"] = implementation[0]
    return ModelType(task, model, options)


@pytest.mark.parametrize(
    "name",
    [
        *FIRST,
        *(pytest.param(name, marks=pytest.mark.ci) for name in AT_A_PUSH),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_change_is_followed(name: str) -> None:
    differences, tried = sweep(kind_of(name))
    crashes = [difference for difference in differences if math.isinf(difference.size)]
    silent = [difference for difference in differences if math.isfinite(difference.size)]
    assert tried > 20
    assert not differences, (
        f"{len(silent)} silent differences:\n{listing(silent)}\n"
        f"{len(crashes)} errors that stock does not raise, or raises alone:\n{listing(crashes)}"
    )


def test_a_sweep_sees_what_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that keeps the activation that it saw follows no change of its class."""

    def keeps(model: nn.Module, level: str) -> None:
        for module in model.modules():
            if type(module).__name__ == "SiLUActivation" and "forward" not in vars(module):
                module.forward = MethodType(type(module).forward, module)

    monkeypatch.setattr(fusedops, "patch", keeps)
    differences, tried = sweep(kind_of("causal llama"), levels=("O1",))
    assert tried > 30
    assert {(difference.place, difference.moment) for difference in differences} == {
        ("SiLUActivation.forward()", "after"),
        ("SiLUActivation.forward()", "undone"),
    }
