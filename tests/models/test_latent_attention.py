"""Latent attention and stretched rotations are those of transformers; what excludes each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits
from safetensors.torch import load_file, save_file
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.generation import Decoder
from fusedops.models import (
    TINY,
    RopeScaling,
    Transformer,
    fill_huggingface,
    from_config,
    load_huggingface,
    save_huggingface,
    to_config,
)
from fusedops.models.attention import LatentAttention
from fusedops.models.attention_core import frequencies
from fusedops.models.huggingface.families import FAMILIES

transformers = pytest.importorskip("transformers")

LATENT = TINY["tiny-deepseek"]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0},
    "yarn-mscale": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    "yarn-attention": {"factor": 4.0, "attention_factor": 1.7},
    "yarn-ratio": {"factor": None},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 9.0, 27.0],
    },
}


def _their_config(kind: str = "default", values: dict[str, Any] | None = None, **more: Any) -> Any:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, **(values or {})}
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = 16
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: getattr(LATENT, name) for name in names}
    return transformers.DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        max_position_embeddings=64,
        rope_parameters=rope,
        attn_implementation="sdpa",  # the other one has a softmax in float32
        **sizes | more,
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [16, 100])
def test_stretched_rotations_are_those_of_transformers(name: str, length: int) -> None:
    kind = name.split("-")[0]
    theirs = _their_config(kind, SCALINGS[name])
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    expected, factor = function(theirs, torch.device("cpu"), seq_len=length)
    ours = from_config(theirs)
    assert ours.rope_scaling is not None and ours.rope_scaling.kind == kind
    torch.testing.assert_close(ours.rope_scaling.table_factor, factor)
    positions = torch.arange(length)
    plain = frequencies(positions, replace(ours, rope_scaling=None), torch.float32)
    actual = frequencies(positions, ours, torch.float32)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(plain, actual) is (kind == "dynamic" and length == 16)


@pytest.mark.parametrize("name", [*SCALINGS, "default"])
def test_a_configuration_is_written_as_it_was_read(name: str) -> None:
    ours = from_config(_their_config(name.split("-")[0], SCALINGS.get(name)))
    assert ours.num_experts == 0
    values = to_config(ours)
    assert from_config(values) == ours
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(values))
    assert from_config(theirs) == ours
    assert to_config(LATENT)["n_shared_experts"] == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "yarns"}, "did you mean 'yarn'"),
        ({"kind": "linear", "beta_fast": 4.0}, "beta_fast must be left out with kind 'linear'"),
        ({"kind": "yarn", "beta_fast": 0.5}, "beta_fast must be above beta_slow, 1.0, got 0.5"),
        ({"kind": "yarn", "attention_factor": 0.0}, "attention_factor must be positive"),
        ({"kind": "longrope", "short_factors": [0.0]}, "short_factors must be positive"),
    ],
)
def test_rotations_without_a_meaning_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RopeScaling(**values)


def test_the_layer_that_predicts_later_tokens_is_left_out(tmp_path: Path) -> None:
    model = Transformer(LATENT)
    save_huggingface(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.2.eh_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    again = load_huggingface(tmp_path)
    expected = model.state_dict()
    with pytest.raises(ValueError, match="model must be of balance_rate above 0"):
        fill_huggingface(Transformer(replace(LATENT, balance_rate=0.0)), tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


class _ExactNorm(nn.Module):
    """Their norm, which computes in float32, in the dtype of its input."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("query_rank", [40, None], ids=["", "queries of hidden states"])
@pytest.mark.parametrize("scaling", ["", "yarn-mscale"])
def test_a_layer_is_theirs_in_float64(bias: bool, query_rank: int | None, scaling: str) -> None:
    torch.manual_seed(0)
    module = transformers.models.deepseek_v3.modeling_deepseek_v3
    kind = scaling.split("-")[0] or "default"
    config = _their_config(kind, SCALINGS.get(scaling), q_lora_rank=query_rank, attention_bias=bias)
    theirs = module.DeepseekV3Attention(config, 0).double()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if getattr(theirs, name) is not None:
            setattr(theirs, name, _ExactNorm(getattr(theirs, name)))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    scales = from_config(_their_config(kind, SCALINGS.get(scaling))).rope_scaling
    ours_config = replace(LATENT, q_lora_rank=query_rank, bias=bias, rope_scaling=scales)
    ours = LatentAttention(ours_config, 0).double()
    names = {}
    for name, _ in ours.named_parameters():
        part, _, suffix = name.partition(".")
        their_name = FAMILIES["deepseek_v3"].names[f"attention.{part}"]
        names[name] = f"{their_name.removeprefix('self_attn.')}.{suffix}"
    values = dict(theirs.named_parameters())
    assert set(names.values()) == set(values)
    ours.load_state_dict({name: values[names[name]] for name in names})

    model = Transformer(replace(ours_config, num_layers=1, dense_layers=0), dtype=torch.float64)
    context = model.make_context(torch.zeros(2, 23, dtype=torch.int64))
    assert context.rotary is not None
    # Theirs takes each angle once for both elements of a pair, in the first half of the table.
    half = [torch.cat((angles[:, ::2], angles[:, ::2]), -1)[None] for angles in context.rotary]
    x, slope = torch.randn(2, 2, 23, 64, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, _ = theirs(inputs[0], (half[0], half[1]), None)
    actual = ours(inputs[1], context)
    expected.backward(slope)
    actual.backward(slope)
    assert_close(actual, expected, expected, depth=64)
    assert_close(inputs[1].grad, inputs[0].grad, inputs[0].grad, depth=64)
    for name, parameter in ours.named_parameters():
        their_grad = values[names[name]].grad
        assert_close(parameter.grad, their_grad, their_grad, depth=64)


DENSE = replace(
    LATENT,
    **dict.fromkeys(("num_experts", "dense_layers", "shared_size", "balance_rate"), 0),
    **dict.fromkeys(("expert_size", "num_groups", "topk_groups")),
    top_k=1,
    initializer_range=0.2,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_absorbed_decoding_is_the_unabsorbed_forward(dtype: torch.dtype) -> None:
    """A prompt in one piece and token by token: both within the rounding of a forward."""
    torch.manual_seed(0)
    model = Transformer(DENSE, dtype=dtype).eval()
    exact = Transformer(DENSE, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    prompts = torch.randint(256, (2, 40))
    decoder = Decoder(model, 64)
    with torch.no_grad():
        expected, truth = model(prompts), exact(prompts)
        last = decoder.prefill(list(prompts))
        rows = [decoder.prefill(list(prompts[:, :1]))]
        rows += [decoder.step(tokens) for tokens in prompts[:, 1:].unbind(1)]
        actual = torch.stack(rows, 1)
        alone = Decoder(model, 64)
        rows = [alone.prefill([prompts[1, :1]])]
        rows += [alone.step(token) for token in prompts[1, 1:].split(1)]
    budget = dtypes.rms_budget(expected, truth, dtype, depth=DENSE.hidden_size)
    assert dtypes.rms(actual.double() - truth) <= budget
    assert dtypes.rms(last.double() - truth[:, -1]) <= budget
    if dtype != torch.bfloat16:  # baddbmm promises nothing on AMX
        assert_same_bits(torch.cat(rows), actual[1])
    # Of a token the cache has the latent and the shared key alone.
    assert {key: cached.shape for key, cached in decoder.cache.tensors.items()} == {
        (layer, "latents"): (2, 1, 64, 24 + 8) for layer in range(2)
    }


def test_a_quantised_model_decodes_what_its_forward_computes() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(DENSE, kv_lora_rank=32, q_lora_rank=None)).eval()
    fusedops.quantize(model, "int8", group=32)
    tokens = fusedops.generate(model, [5, 17, 3], tokens=16)[0].tokens
    with torch.no_grad():
        logits = model(torch.tensor([[5, 17, 3, *tokens[:-1]]]))[0, 2:]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_limit_a_cache(kind: str) -> None:
    values: dict[str, Any] = {"kind": kind, "factor": 2.0}
    if kind == "longrope":
        factors = [1.0, 2.0, 3.0, 4.0]
        values |= {"original_seq_len": 64, "short_factors": factors, "long_factors": factors}
    model = Transformer(replace(DENSE, rope_scaling=RopeScaling(**values)), device="meta")
    assert Decoder(model, 64).cache.capacity == 64
    with pytest.raises(ValueError, match="max_seq_len must be at most 64, up to which rotations"):
        Decoder(model, 65)
