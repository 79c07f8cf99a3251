"""Layers of types without a table are known as copies, or by what their code computes.

One that differs by an operation is not known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from causal_families import BY_CODE, HEADS, IDS, causal
from encoder_families import FAMILIES as ENCODERS
from home_made import WIDTH, TimmMlp, TorchtitanFeedForward
from patch_testing import counted, patched_pair
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

import fusedops
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.experts import known_gate
from fusedops.integrations.hf.rules.recognition import clamped_gate_of
from fusedops.integrations.hf.symbolic import paths_of


def rows() -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


class UnknownOperation(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x).cumsum(-1))


class ComparesItsInput(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = self.w3(x) if y is None else y
        return self.w2(F.silu(self.w1(x)) * y)


@pytest.mark.parametrize("cls", [UnknownOperation, ComparesItsInput])
def test_other_code_is_not_taken(cls: type[nn.Module]) -> None:
    assert tables.rule_of_class(cls) is None


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias)


class ScaledLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) * 2


class SquareLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight


@pytest.mark.parametrize(
    ("cls", "bias", "count"),
    [
        (OwnLinear, True, 1),
        (FalconLinear, False, 1),
        (FalconLinear, True, 0),  # adds it to the rounded product
        (ScaledLinear, True, 0),
        (SquareLinear, False, 0),
    ],
)
@pytest.mark.usefixtures("own_products")
def test_a_class_derived_from_linear_is_known_by_its_code(
    cls: type[nn.Linear], bias: bool, count: int
) -> None:
    torch.manual_seed(0)
    module = TimmMlp()
    module.fc1, module.fc2 = cls(WIDTH, WIDTH, bias=bias), cls(WIDTH, WIDTH, bias=bias)
    patched, stock = patched_pair(module)
    with counted() as calls:
        torch.testing.assert_close(patched(rows()), stock(rows()))
    assert calls["mlp"] == count


class OtherBound(MiniMaxM3VLExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.swiglu_limit)
        up = up.clamp(min=self.swiglu_limit, max=self.swiglu_limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.swiglu_alpha))


def test_a_clamped_gate_is_known_by_its_code() -> None:
    for cls, interleaved in ((GptOssExperts, True), (MiniMaxM3VLExperts, False)):
        gate = clamped_gate_of(paths_of(cls, "_apply_gate")[0].result)
        assert gate is not None and gate.interleaved == interleaved
    for cls in (OtherBound, DeepseekV4Experts):
        assert clamped_gate_of(paths_of(cls, "_apply_gate")[0].result) is None


EXPERTS = causal(
    "MiniMaxM3VL", HEADS | {"num_local_experts": 4}, {}, config="MiniMaxM3VLTextConfig"
)


def test_a_limit_that_the_op_lacks_leaves_the_gate_to_the_module() -> None:
    patched: Any = EXPERTS.pair()[0]
    experts = patched.model.layers[0].mlp.experts
    gate = known_gate(experts)
    assert gate is not None and gate.activation == "swiglu_oai" and not gate.interleaved
    experts.swiglu_limit = 0.5
    assert known_gate(experts) is None


def test_a_loop_that_is_not_known_keeps_its_experts() -> None:
    patched, stock = EXPERTS.pair(experts_implementation="eager")
    reason = fusedops.patch(patched)["model.layers.0.mlp.experts"].reason
    assert "experts_implementation='eager'" in reason
    with counted() as calls:
        torch.testing.assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["moe_mlp"] == 0


def test_a_layer_without_cross_attention_is_patched() -> None:
    sizes = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "pad_token_id": 1}
    patched, stock = causal("XGLM", sizes, {}).pair()
    with counted() as calls:
        torch.testing.assert_close(patched.eval()(IDS).logits, stock.eval()(IDS).logits)
    assert calls["add_layer_norm"] == 2 and calls["mlp"] == 2


def test_the_report_names_what_is_copied() -> None:
    report = fusedops.patch(ENCODERS["RobertaForMaskedLM"].model())
    entry = report["roberta.encoder.layer.0.output"]
    assert entry.cls == "RobertaOutput" and entry.reason == "as BertSelfOutput"


def test_a_module_of_patched_classes_has_no_others() -> None:
    from fusedops.integrations.hf.patched.transformers.models.granite import (
        modeling_granite as module,
    )

    patched, _ = BY_CODE["Granite"].pair()
    assert type(patched.model.layers[0].mlp) is module.GraniteMLP
    assert module.GraniteMLP.__name__ == "GraniteMLP"
    for name in ("GraniteForCausalLM", "nothing", "torch"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import fusedops.integrations.hf.patched.no_such_package as missing

        missing.Anything  # noqa: B018


class OwnOutput(nn.Module):
    """A copy of the end of BERT's attention in a file of the user's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        first = modeling_bert.BertSelfOutput(config)
        self.dense, self.dropout, self.LayerNorm = first.dense, first.dropout, first.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


def test_a_home_made_copy_is_taken() -> None:
    rule = tables.rule_of_class(OwnOutput)
    assert rule is not None and rule.copy_of == "BertSelfOutput"
