"""What is special about gated norms: the models' modules, rows inside wider ones, refusals."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits

import fusedops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATE_FIRST = {"norm_before_gate": False}
# Module of transformers -> its arguments after the size, and our options.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next.Qwen3NextRMSNormGated": ({}, {}),
    "kimi_linear.KimiLinearRMSNormGated": ({}, {"gate_activation": "sigmoid"}),
    "mamba2.MambaRMSNormGated": ({}, GATE_FIRST),
    "zamba2.Zamba2RMSNormGated": ({"group_size": 24}, GATE_FIRST | {"groups": 2}),
}


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_models(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    family, _, kind = name.partition(".")
    pytest.importorskip("transformers")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    arguments, options = MODELS[name]
    module = getattr(modeling, kind)(48, eps=1e-5, **arguments).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    x, gate = (torch.randn(3, 7, 48).to(dtype).requires_grad_() for _ in range(2))
    leaves = (x, gate, module.weight)
    grad = torch.randn(3, 7, 48).to(dtype)

    def with_gradients(result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (result, *torch.autograd.grad(result, leaves, grad))

    with fusedops.use_backend(backend):
        got = with_gradients(fusedops.rms_norm(x, (48,), module.weight, 1e-5, gate=gate, **options))
    models = with_gradients(module(x, gate))
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    leaves, grad = tuple(doubles), grad.double()
    wide, opened, weight = doubles
    exact = fusedops.gated_rms_norm(wide, opened, weight, 1e-5, **options)
    for ours, theirs, want in zip(got, models, with_gradients(exact), strict=True):
        # The models round more often: their error is in the bound.
        assert_close(ours, want, theirs, name, depth=48 * 21)


@pytest.mark.parametrize("options", [{}, GATE_FIRST], ids=["norm_first", "gate_first"])
def test_rows_inside_wider_ones_give_the_bits_of_dense_rows(options: dict[str, Any]) -> None:
    projected, weight = torch.randn(2, 5, 96), torch.rand(32)
    gate, x, _ = projected.split([32, 32, 32], -1)
    want = fusedops.gated_rms_norm(x.contiguous(), gate.contiguous(), weight, **options)
    assert_same_bits(fusedops.gated_rms_norm(x, gate, weight, **options), want)


def test_groups_are_norms_of_their_own() -> None:
    x, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.rand(48)
    got = fusedops.gated_rms_norm(x, gate, weight, groups=3)
    for group in range(3):
        part = slice(16 * group, 16 * group + 16)
        want = fusedops.gated_rms_norm(x[:, part], gate[:, part], weight[part])
        assert_same_bits(got[:, part], want)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("gate", {"groups": 2}),
        ("gate", GATE_FIRST),
        ("gate", {"gate_activation": "sigmoid"}),
        ("weight_offset", {"gate": torch.ones(3, 8), "weight_offset": 1.0}),
        ("rounding", {"gate": torch.ones(3, 8), "rounding": "hf"}),
        ("groups", {"gate": torch.ones(3, 8), "groups": 3}),
    ],
)
def test_rms_norm_refuses_what_does_not_go_together(argument: str, options: Any) -> None:
    with pytest.raises(ValueError, match=f"^rms_norm: {argument} must be"):
        fusedops.rms_norm(torch.ones(3, 8), (8,), **options)


def test_rms_norm_with_a_gate_has_one_normalised_dimension() -> None:
    x = torch.ones(3, 2, 4)
    with pytest.raises(ValueError, match="normalized_shape"):
        fusedops.rms_norm(x, (2, 4), gate=x)
