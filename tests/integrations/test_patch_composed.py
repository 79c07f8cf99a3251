"""Feed-forward layers with other operations between their parts, and linear layers and experts.

Each is known by what its code computes; one that differs by an operation is not, or computes that.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from causal_families import IDS, SIZES
from families import build
from home_made import WIDTH, TimmMlp, TorchtitanFeedForward
from patch_testing import assert_same_training, counted, patched_pair
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

import fusedops
from fusedops._core import dtypes
from fusedops.integrations.hf import tables
from fusedops.integrations.hf.rules.experts import known_gate
from fusedops.integrations.hf.rules.recognition import batched_experts_of, clamped_gate_of
from fusedops.integrations.hf.symbolic import paths_of


def rows() -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(module: nn.Module) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    return (module(rows().to(dtype)).float() * rows().roll(1, 0)).sum()


class ScaledGate(TorchtitanFeedForward):
    scale = 0.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w3(x) * F.silu(self.w1(x) * self.scale)) * self.scale


class BoundedGate(TorchtitanFeedForward):
    limit = 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x).clamp(max=self.limit)
        up = self.w3(x).clamp(min=-self.limit, max=self.limit)
        return self.w2((up + 1) * (gate * torch.sigmoid(1.702 * gate)))


class OtherSlope(TorchtitanFeedForward):
    slope = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x)
        return self.w2(self.w3(x) * (gate * torch.sigmoid(self.slope * gate)))


class SumOfHalves(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) + self.w3(x))


class OneProjection(TorchtitanFeedForward):
    def __init__(self) -> None:
        super().__init__()
        del self.w3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w1(x))


class NormAtTheEnd(TimmMlp):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.fc2(self.act(self.fc1(x))))


class UsedTwice(TimmMlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.fc1(x))
        return self.fc2(hidden) + self.fc2(hidden.tanh())


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 96, bias=False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, index: int | None = None) -> torch.Tensor:
        packed = self.packed(x) + self.adapters[index](x)
        gate, up = packed.chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)


class Float32Down(TorchtitanFeedForward):
    """T5's way to keep half of a layer in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.w1(x)) * self.w3(x)
        if isinstance(self.w2.weight, torch.Tensor) and hidden.dtype != self.w2.weight.dtype:
            hidden = hidden.to(self.w2.weight.dtype)
        return self.w2(hidden)


LAYERS: dict[type[nn.Module], str] = {
    ScaledGate: "swiglu",
    BoundedGate: "geglu",
    SumOfHalves: "linear_act",
    OneProjection: "linear_glu",
    NormAtTheEnd: "mlp",
    UsedTwice: "linear_act",
    Float32Down: "linear_glu",
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
@pytest.mark.usefixtures("own_products")
def test_training_matches_stock(cls: type[nn.Module], autocast: bool) -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(cls())
    with counted() as calls:
        loss(patched)
    # On the CPU a linear layer alone is linear_act too.
    assert calls[LAYERS[cls]] == 1 or LAYERS[cls] == "linear_act"
    report = fusedops.describe(patched)
    assert report[""].op == LAYERS[cls]
    assert_same_training(patched, stock, loss, autocast=autocast, draws=3)


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_bfloat16_is_as_precise_as_stock(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(cls().to(torch.bfloat16))
    results = []
    for module in (patched, stock, copy.deepcopy(stock).double()):
        dtype = next(module.parameters()).dtype
        x = rows().bfloat16().to(dtype).requires_grad_()
        output = module(x)
        assert output.dtype == dtype
        output.backward(rows().roll(1, 0).bfloat16().to(dtype))
        results.append([output.detach(), x.grad, *(p.grad for p in module.parameters())])
    for actual, eager, exact in zip(*results, strict=True):
        budget = dtypes.error_budget(eager, exact, torch.bfloat16, depth=64)
        assert ((actual.double() - exact).abs() <= budget).all()


def test_compiled_without_a_break() -> None:
    for cls in LAYERS:
        patched, stock = patched_pair(cls())
        compiled = torch.compile(patched, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(rows()), stock(rows()))


@pytest.mark.usefixtures("own_products")
def test_a_slope_that_is_no_activation_of_ours_is_left_alone() -> None:
    assert type(patched_pair(OtherSlope())[0]) is OtherSlope
    for slope in (1.0, 1.702):
        torch.manual_seed(0)
        module = OtherSlope()
        module.slope = slope
        patched, stock = patched_pair(module)
        with counted() as calls:
            assert_same_training(patched, stock, loss)
        assert calls["linear_glu"] > 0
    patched.slope = stock.slope = 2.0
    with counted() as calls:
        assert torch.equal(patched(rows()), stock(rows()))
    assert calls["linear_glu"] == 0


@pytest.mark.usefixtures("own_products")
def test_an_unknown_activation_is_no_failure() -> None:
    module = GatedByModule()
    report = fusedops.patch(module)
    assert type(module) is GatedByModule and not report.failed
    module.act = nn.SiLU()
    with counted() as calls:
        fusedops.patch(module)
        module(rows())
    assert calls["linear_glu"] == 1


class GatedByModule(TorchtitanFeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.Mish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class DropsTwice(TorchtitanFeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(self.drop(hidden) * self.drop(hidden))


def test_what_draws_numbers_twice_draws_twice() -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(DropsTwice())
    assert type(patched) is not DropsTwice
    torch.manual_seed(1)
    found = patched(rows())
    torch.manual_seed(1)
    torch.testing.assert_close(found, stock(rows()))


def test_an_argument_with_a_default_may_be_given_or_not() -> None:
    torch.manual_seed(0)
    patched, stock = patched_pair(Adapter())
    for index in (0, 1):
        with counted() as calls:
            torch.testing.assert_close(patched(rows(), index), stock(rows(), index=index))
            torch.testing.assert_close(patched(rows(), index=index), stock(rows(), index))
        assert calls["geglu"] == 2
    with pytest.raises(TypeError):
        patched(rows())


def test_half_of_a_layer_may_be_float32() -> None:
    torch.manual_seed(0)
    module = Float32Down().to(torch.bfloat16)
    module.w2.float()
    patched, stock = patched_pair(module)
    with counted() as calls:
        found = patched(rows().bfloat16())
    assert calls["linear_glu"] == 1
    assert found.dtype == torch.float32
    eager, exact = (
        stock(rows().bfloat16()),
        copy.deepcopy(stock).double()(rows().bfloat16().double()),
    )
    budget = dtypes.error_budget(eager, exact, torch.bfloat16, depth=64)
    assert ((found.double() - exact).abs() <= budget).all()


def test_a_hook_on_a_part_is_called() -> None:
    patched, stock = patched_pair(ScaledGate())
    shapes: list[torch.Size] = []
    patched.w1.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    torch.testing.assert_close(patched(rows()), stock(rows()))
    assert len(shapes) == 1


class UnknownOperation(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x).cumsum(-1))


class AsksWhatItIs(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, nn.Parameter):
            return x
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ComparesItsInput(TorchtitanFeedForward):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = self.w3(x) if y is None else y
        return self.w2(F.silu(self.w1(x)) * y)


@pytest.mark.parametrize(
    "cls", [UnknownOperation, AsksWhatItIs, ComparesItsInput], ids=lambda cls: cls.__name__
)
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


class SwappedHalves(Llama4TextExperts):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate_up = torch.bmm(hidden_states, self.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.bmm(gate * self.act_fn(up), self.down_proj).view(-1, self.hidden_size)


def test_experts_by_bmm_are_known_and_their_halves_have_an_order() -> None:
    assert batched_experts_of(paths_of(Llama4TextExperts)[0].result) is not None
    assert batched_experts_of(paths_of(SwappedHalves)[0].result) is None


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


def test_a_limit_that_the_op_lacks_leaves_the_gate_to_the_module() -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    stock: Any = build(
        "MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", SIZES | sizes, varied=("norm",)
    )
    patched = copy.deepcopy(stock)
    fusedops.patch(patched)
    experts = patched.model.layers[0].mlp.experts
    gate = known_gate(experts)
    assert gate is not None and gate.activation == "swiglu_oai" and not gate.interleaved
    experts.swiglu_limit = 0.5
    assert known_gate(experts) is None


def test_a_loop_that_is_not_known_keeps_its_experts() -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    stock: Any = build(
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        SIZES | sizes | {"experts_implementation": "eager"},
        varied=("norm",),
    )
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    assert "experts_implementation='eager'" in report["model.layers.0.mlp.experts"].reason
    with counted() as calls:
        torch.testing.assert_close(patched(IDS).logits, stock(IDS).logits)
    assert calls["moe_mlp"] == 0


def test_a_layer_without_cross_attention_is_patched() -> None:
    sizes = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 97}
    stock: Any = build(
        "XGLMForCausalLM", "XGLMConfig", sizes | {"pad_token_id": 1}, varied=("norm",)
    )
    patched = copy.deepcopy(stock)
    fusedops.patch(patched)
    with counted() as calls:
        torch.testing.assert_close(patched.eval()(IDS).logits, stock.eval()(IDS).logits)
    assert calls["add_layer_norm"] == 2 and calls["mlp"] == 2
