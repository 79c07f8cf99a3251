"""Experts with packed weights compute what the dequantised weights do, in every form of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close
from torch import nn

import fusedops
from fusedops.generation import Decoder
from fusedops.models import TINY, Transformer
from fusedops.nn import MoE
from fusedops.nn.quantized_experts import QuantizedExperts


def mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=4)
    )


def gpt_oss() -> nn.Module:
    """Return experts with biases, transposed weights and a gate of their own."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    return GptOssMLP(
        GptOssConfig(
            hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
        )
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nn.MoE": lambda: MoE(32, 48, num_experts=4, top_k=2, bias=True),
    "nn.MoE, transposed, no gate": lambda: MoE(
        32, 48, num_experts=4, top_k=2, gated=False, transposed=True, activation="relu"
    ),
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
}


def output(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: Any = layer(x)
    return result if isinstance(result, torch.Tensor) else result[0]


def pair(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """Return a layer with quantised experts, a stock one of the same weights, and the report."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    stock = LAYERS[name]()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(stock)
    report = fusedops.quantize(model, "int4", group=16)
    experts = model.get_submodule("experts")
    assert isinstance(experts, QuantizedExperts)
    for part, layer in ((experts.first_name, experts.first), ("down_proj", experts.down)):
        weight = layer.dequantize()
        weight = weight.transpose(1, 2) if experts.transposed else weight
        stock.get_parameter(f"experts.{part}").data.copy_(weight)
    return model, stock, report


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_experts_compute_with_their_dequantised_weights(name: str, tokens: int) -> None:
    model, stock, report = pair(name)
    assert {entry.name for entry in report.quantized} == {
        f"experts.{part}"
        for part in (model.get_submodule("experts").first_name, "down_proj")  # type: ignore[union-attr]
    }
    assert all(0 < entry.error < 0.2 for entry in report.quantized)
    wide = copy.deepcopy(stock).double()
    x = torch.randn(1, tokens, 32)
    results = []
    for layer, given in ((model, x), (stock, x), (wide, x.double())):
        leaf = given.clone().requires_grad_()
        y = output(layer, leaf)
        trained = [p for n, p in layer.named_parameters() if n.endswith("bias") or "gate" in n]
        grads = torch.autograd.grad(y.square().sum(), [leaf, *trained], allow_unused=True)
        assert grads[0] is not None
        results.append([y, grads[0]])
    for mine, eager, truth in zip(*results, strict=True):
        assert_close(mine, truth, eager, depth=48 * 32)


def test_a_state_dict_and_repr_and_patch() -> None:
    model, stock, _ = pair("mixtral")
    other = copy.deepcopy(stock)
    fusedops.quantize(other, "int4", group=16)
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 5, 32)
    assert torch.equal(output(other, x), output(model, x))
    assert "QuantizedExperts" in repr(model)
    before = output(model, x)
    report = fusedops.patch(model)
    assert "quantised" in report["experts.gate"].reason
    assert torch.equal(output(model, x), before)
    assert "QuantizedExperts" in repr(pair("nn.MoE")[0])


def test_a_module_in_two_places_stays_one() -> None:
    layer = LAYERS["nn.MoE"]()
    experts, linear = layer.get_submodule("experts"), nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([experts, linear]), "c": linear})
    fusedops.quantize(model, "int8")
    assert isinstance(model["b"][0], QuantizedExperts)
    assert model["b"][0] is layer.get_submodule("experts")
    assert model["b"][1] is model["c"]


def test_experts_that_are_not_finite_are_refused() -> None:
    layer = LAYERS["nn.MoE"]()
    with torch.no_grad():
        layer.get_parameter("experts.down_proj")[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        fusedops.quantize(layer)
    with pytest.raises(TypeError, match="no weights of three dimensions"):
        QuantizedExperts(nn.Linear(2, 2))


def test_a_sparse_transformer_decodes_with_quantised_experts() -> None:
    torch.manual_seed(0)
    model = Transformer(TINY["tiny-mixtral"]).eval()
    fusedops.quantize(model, "int8", group=32)
    assert any(isinstance(module, QuantizedExperts) for module in model.modules())
    tokens = torch.randint(3, 200, (12,))
    decoder = Decoder(model, 64)
    logits = [decoder.prefill([tokens[:4]])]
    logits += [decoder.step(tokens[place : place + 1]) for place in range(4, 12)]
    with torch.no_grad():
        whole = model(tokens[None])[0, 3:]
    torch.testing.assert_close(torch.cat(logits), whole)
    # Which experts run follows from the tokens.
    assert decoder._recorded.reason is not None
