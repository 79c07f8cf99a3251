"""Decoder families: a patched model trains and generates as the stock one, as it is configured.

What every causal language model must do is tested in ``test_patch_families_causal.py``. Here is
what is about attention, and what only some families have.
"""

from __future__ import annotations

import pytest
import torch
from causal_families import DENSE, IDS, loss
from patch_testing import assert_close, assert_same_training, counted
from torch import nn

import fusedops
from fusedops._core import dtypes
from fusedops.integrations import describe

EAGER = {"attn_implementation": "eager"}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "mish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_gated_mlp_variants(name: str, bias: bool, activation: str) -> None:
    patched, stock = DENSE[name].pair(hidden_act=activation, mlp_bias=bias)
    assert_same_training(patched, stock, loss)


def test_gemma2_caps_the_scores_as_it_is_configured_to() -> None:
    patched, stock = DENSE["Gemma2"].pair(attn_logit_softcapping=0.1, **EAGER)
    assert_same_training(patched, stock, loss)
    capped, free = (DENSE["Gemma2"].model(attn_logit_softcapping=cap) for cap in (0.1, None))
    if capped._supports_sdpa:  # which ignores the cap; transformers 5.23 no longer allows it
        assert torch.equal(capped(IDS).logits, free(IDS).logits)
    for model in (capped, free):
        model.set_attn_implementation("eager")
        fusedops.patch(model)
    assert not torch.equal(capped(IDS).logits, free(IDS).logits)


def test_float64_is_normalised_in_float32_as_the_models_do() -> None:
    patched, stock = (model.double() for model in DENSE["Llama"].pair())
    with counted() as calls:
        found = patched(IDS).logits
    assert (calls["rms_norm"], calls["add_rms_norm"], calls["attention"]) == (0, 0, 2)
    expected = stock(IDS).logits
    budget = dtypes.error_budget(expected, expected, torch.float64, depth=64)
    assert ((found - expected).abs() <= budget).all()


def test_static_cache_and_packed_sequences() -> None:
    patched, stock = (model.eval() for model in DENSE["Mistral"].pair())
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    tokens, wanted = (model.generate(IDS, **options) for model in (patched, stock))
    assert torch.equal(tokens, wanted)
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    assert_close(*(model(IDS, position_ids=packed).logits for model in (patched, stock)))


@pytest.mark.usefixtures("own_products")
def test_opt_calls_the_feed_forward_children_that_have_hooks() -> None:
    patched, stock = DENSE["OPT"].pair()
    shapes: dict[nn.Module, torch.Size] = {}
    for model in (patched, stock):
        model.model.decoder.layers[0].fc1.register_forward_hook(
            lambda module, args, output, model=model: shapes.__setitem__(model, output.shape)
        )
    with counted() as calls:
        assert_same_training(patched, stock, loss)
    assert (calls["mlp"], calls["add_layer_norm"]) == (1, 2)
    assert shapes[patched] == shapes[stock]
    report = describe(patched)
    assert report["model.decoder.layers.0"].reason == "without mlp: fc1 has hooks"
    assert report["model.decoder.layers.0.fc2"].op == "linear_act"
    assert report["model.decoder.layers.1.fc2"].reason == "inside model.decoder.layers.1"


class _Adapted(nn.Module):
    """What an adapter library puts in a linear layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((base.out_features,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


@pytest.mark.usefixtures("own_products")
def test_adapted_projections_are_called_and_the_gate_is_still_one_op() -> None:
    patched, stock = DENSE["Llama"].pair()
    for model in (patched, stock):
        mlp = model.model.layers[0].mlp
        mlp.gate_proj = _Adapted(mlp.gate_proj)
    with counted() as calls:
        loss(patched)
    assert (calls["swiglu"], calls["linear_glu"]) == (1, 1)
    assert_same_training(patched, stock, loss)
    report = describe(patched)
    assert "gate_proj is a _Adapted" in report["model.layers.0.mlp"].reason
    assert report["model.layers.0.mlp.up_proj"].op == "linear_act"
    assert report["model.layers.0.mlp.act_fn"].reason == "inside model.layers.0.mlp"
