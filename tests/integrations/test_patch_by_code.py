"""Classes without a table are known as copies, or by what their code computes.

One that differs by an operation is not known.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import home_made
import pytest
import torch
import torch.nn.functional as F
from families import ENCODERS, HEADS, IDS, causal
from home_made import WIDTH
from patch_testing import counted, patched_pair
from torch import nn
from transformers.models.bert import modeling_bert
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.granite import modeling_granite
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

import fusedops
from fusedops.integrations.hf import known_code, tables
from fusedops.integrations.hf.known_code import digest, known_digests
from fusedops.integrations.hf.rules.experts import known_gate
from fusedops.integrations.hf.rules.recognition import clamped_gate_of
from fusedops.integrations.hf.rules.residual_norm import layer_rule
from fusedops.integrations.hf.symbolic import paths_of

ROWS = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
BROADCAST = nn.Parameter(torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(0)))
# A norm, an attribute that its code asks for at every call, values, and whether the op runs then.
ATTRIBUTES: dict[str, tuple[type[nn.Module], str, dict[Any, bool]]] = {
    "condition": (home_made.LitgptRMSNorm, "add_unit_offset", {False: True, True: True}),
    "unknown function": (home_made.ChoosingLayerNorm, "in_low_precision", {True: False}),
    "scale": (home_made.OptionalScaleNorm, "weight", {None: True}),
    "broadcast weight": (home_made.DividingRMSNorm, "weight", {BROADCAST: False}),
}


@pytest.mark.parametrize(("cls", "attribute", "values"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_are_read_at_every_call(
    cls: type[nn.Module], attribute: str, values: dict[Any, bool]
) -> None:
    patched, stock = patched_pair(cls())
    for value, fused in values.items():
        for module in (patched, stock):
            setattr(module, attribute, value)
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), counted() as calls:
                actual = patched(ROWS)
                expected = stock(ROWS)
            assert bool(calls) == fused
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: home_made.NanoGPTMLP(0.5),
        lambda: home_made.TimmMlp(0.5),
        home_made.ConvertedMLP,  # with a second argument
    ],
)
@pytest.mark.usefixtures("own_products")
def test_dropout_draws_what_stock_draws(make: Callable[[], nn.Module]) -> None:
    patched, stock = patched_pair(make())
    options = {"residual": ROWS.roll(2, 1)} if isinstance(stock, home_made.ConvertedMLP) else {}
    for training in (True, False):
        outputs = []
        for module in (patched.train(training), stock.train(training)):
            torch.manual_seed(1)
            with counted() as calls:
                outputs.append(module(ROWS, **options))
            needs_numbers = training and type(stock) is home_made.TimmMlp  # inside of the op
            assert calls["mlp"] == (module is patched and not needs_numbers)
        torch.testing.assert_close(*outputs)


def test_a_split_that_makes_no_halves_runs_the_original() -> None:
    patched, stock = patched_pair(home_made.SplitSwiGLU())
    for module in (patched, stock):
        module.w12 = nn.Linear(WIDTH, 60)
        with pytest.raises(RuntimeError, match="must match"), counted() as calls:
            module(ROWS)  # parts of 48 and 12 columns
        assert not calls["swiglu"]


class Inherited(home_made.TorchtitanRMSNorm):
    """Has the forward of a class in another file."""


def test_an_inherited_forward_is_known_until_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patched, stock = patched_pair(Inherited())
    with counted() as calls:
        torch.testing.assert_close(patched(ROWS), stock(ROWS))
    assert calls["rms_norm"] == 1
    monkeypatch.setattr(home_made.TorchtitanRMSNorm, "forward", lambda self, x: x + 1)
    assert torch.equal(patched(ROWS), ROWS + 1)


class OptionalScale(home_made.ConvertedMLP):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        output = self.down(F.gelu(self.up(x))) + x
        return output if scale is None else output * scale


@pytest.mark.usefixtures("own_products")
def test_an_argument_with_a_default_is_not_added() -> None:
    patched, stock = patched_pair(OptionalScale())
    for args, keywords, fused in (
        ((ROWS,), {}, True),
        ((ROWS, ROWS), {}, False),
        ((ROWS,), {"scale": ROWS}, False),
        ((), {"x": ROWS}, True),
    ):
        with counted() as calls:
            torch.testing.assert_close(patched(*args, **keywords), stock(*args, **keywords))
        assert calls["mlp"] == fused


@pytest.mark.usefixtures("own_products")
def test_what_prevents_fusion_is_reported() -> None:
    model = nn.ModuleDict({"a": home_made.TimmMlp(activation=nn.Mish), "b": home_made.TimmMlp()})
    model.b.fc2.register_forward_hook(lambda *args: None)
    report = fusedops.patch(model)
    assert "Mish" in report["a"].reason and not report["a"].replaced
    assert report["b"].reason == "linear_act alone: fc2 has hooks"
    expected = copy.deepcopy(model)
    fusedops.unpatch(expected)
    torch.testing.assert_close(model.b(ROWS), expected.b(ROWS))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


def _scale(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls = 1
    return _normed(self, x)


def _asks_configuration(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if self.config.type == "plain" else _normed(self, x)


def _asks_for_gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _normed(self, x) if torch.is_grad_enabled() else x


def _asks_for_types(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else _normed(self, x)


def _closed(eps: float) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda self, x: F.rms_norm(x, (x.size(-1),), self.weight, eps)


EPSILONS = {"norm": 1e-6}


class OwnCall(home_made.PlainRMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + 1


class Derived(home_made.PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class UnknownOperation(home_made.TorchtitanFeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x).cumsum(-1))


class ComparesItsInput(home_made.TorchtitanFeedForward):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        y = self.w3(x) if y is None else y
        return self.w2(F.silu(self.w1(x)) * y)


class FirstDimension(home_made.PackedSwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = self.w12(x).chunk(2)
        return self.w3(F.silu(x1) * x2)


# Forwards of norms, and the op of their rule. More formulae: LEFT in ``test_compile_passes.py``.
FORWARDS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str | None]] = {
    "norm": (_normed, "rms_norm"),
    "formula": (lambda self, x: x * _scale(self, x) * self.weight, "rms_norm"),
    "sum": (
        lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight,
        None,
    ),
    "dimension of an attribute": (
        lambda self, x: x * torch.rsqrt(x.pow(2).mean(self.dim, True) + self.eps) * self.weight,
        None,
    ),
    "result in float32": (
        lambda self, x: x.float() * _scale(self, x.float()) * self.weight,
        None,
    ),
    "weight in float32": (lambda self, x: x * _scale(self, x) * self.weight.float(), None),
    "weight in float32 first": (
        lambda self, x: self.weight.float() * (x.float() * _scale(self, x.float())).to(x.dtype),
        None,
    ),
    "last sizes": (lambda self, x: F.rms_norm(x, x.shape[-2:], None, self.eps), None),
    "another size": (lambda self, x: F.rms_norm(x, x.shape[0:1], self.weight, self.eps), None),
    "shape as a factor": (lambda self, x: _normed(self, x) * x.shape[-1], None),
    "without gradient": (torch.no_grad()(_normed), None),
    "own backward": (lambda self, x: OwnFunction.apply(x), None),
    "counts": (_counts, None),
    "asks for the configuration": (_asks_configuration, None),
    "asks for gradients": (_asks_for_gradients, None),
    "asks for types": (_asks_for_types, None),
    "closure": (_closed(1e-5), None),
    "table": (
        lambda self, x: F.rms_norm(x, (x.size(-1),), self.weight, EPSILONS["norm"]),
        None,
    ),
}


@pytest.mark.parametrize(("forward", "op"), FORWARDS.values(), ids=FORWARDS)
def test_what_computes_something_else_is_not_recognised(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any], op: str | None
) -> None:
    body = {"forward": forward, "__module__": __name__}
    cls = type("Layer", (home_made.Scaled,), body)
    monkeypatch.setattr(f"{__name__}.Layer", cls, raising=False)
    rule = tables.rule_of_class(cls)
    assert (rule is not None) == (op is not None)
    if rule is not None:
        assert rule.plan(cls()).ops == (op,)


@pytest.mark.parametrize(
    "cls", [OwnCall, Derived, FirstDimension, UnknownOperation, ComparesItsInput]
)
def test_a_class_that_computes_something_else_is_not_recognised(cls: type[nn.Module]) -> None:
    assert tables.rule_of_class(cls.__base__) is not None
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
    module = home_made.TimmMlp()
    module.fc1, module.fc2 = cls(WIDTH, WIDTH, bias=bias), cls(WIDTH, WIDTH, bias=bias)
    patched, stock = patched_pair(module)
    with counted() as calls:
        torch.testing.assert_close(patched(ROWS), stock(ROWS))
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


class OneBound(DeepseekV4MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x).clamp(max=self.limit))


@pytest.mark.parametrize(
    ("cls", "bias", "op"),
    [(DeepseekV4MLP, False, "linear_glu"), (DeepseekV4MLP, True, "swiglu"), (OneBound, False, "")],
)
def test_a_layer_with_a_clamped_gate(cls: Any, bias: bool, op: str) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "mlp_bias": bias}
    torch.manual_seed(0)
    pair = patched_pair(cls(SimpleNamespace(**sizes, hidden_act="silu", swiglu_limit=0.25)))
    results = []
    for model in pair:
        with counted() as calls:
            output = model(ROWS)
        grads = torch.autograd.grad(output.square().sum(), list(model.parameters()))
        results.append([output, *grads])
        if model is pair[0]:
            assert {"linear_glu", "swiglu"} & calls.keys() == ({op} if op else set())
    torch.testing.assert_close(*results)
    pair[0].limit = -0.25
    reason = fusedops.describe(pair[0]).modules[0].reason
    assert not op or "the limit of its gate is -0.25" in reason


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


# Fused forwards serve the code that they were written for, with its names of arguments.

FILE = """
import torch
from torch import nn

def scaled(x):
    return 2 * x

class Layer(nn.Module):
    def forward(self, x, y=1):
        'A sentence.'
        return self.inner(x) + y

    def inner(self, x):
        return scaled(x)
"""


def test_a_digest_is_of_all_that_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    sources = (
        FILE,
        FILE.replace("'A sentence.'", "'Another.'").replace("x):", "x: torch.Tensor):"),
        FILE.replace("2 * x", "3 * x"),
    )
    layers = []
    for index, source in enumerate(sources):
        (tmp_path / f"digested_{index}.py").write_text(source)
        layers.append(importlib.import_module(f"digested_{index}").Layer)
    plain, same, other = layers
    assert digest(plain) == digest(same) != digest(other)
    assert digest(plain.inner) != digest(plain)


def test_what_is_listed_is_in_this_transformers() -> None:
    for section in tables._SECTIONS:
        for name in known_digests()[section]:
            kind, cls = name.split(".")
            modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            assert known_code.known_as(getattr(modeling, cls), section) == name
            assert tables.rule_of_class(getattr(modeling, cls)) is not None


def test_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = modeling_granite.GraniteDecoderLayer
    listed = known_digests() | {"t5": {"granite.GraniteDecoderLayer": {"0123456789ab": "5.0"}}}
    monkeypatch.setattr(known_code, "known_digests", lambda: listed)
    assert tables._made(layer) == (
        "this transformers has another GraniteDecoderLayer: the digest of its code is "
        f"{digest(layer)}, known are 0123456789ab"
    )


def test_code_without_source_has_no_digest() -> None:
    namespace: dict[str, Any] = {"nn": nn, "__name__": "transformers.nowhere"}
    exec("class Layer(nn.Module):\n    def forward(self, x): return x", namespace)
    assert digest(namespace["Layer"]) is None


def _accepts_the_former_name(forward: Any) -> Any:
    """Stand for ``deprecate_kwarg`` of transformers, which a class of this file cannot have."""

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(self, *args, **kwargs)

    return renamed


class _Later(nn.Module):
    """A layer of a release in which ``past_key_values`` is ``cache``."""

    @_accepts_the_former_name
    def forward(self, hidden_states: Any, mask: Any = None, cache: Any = None, **kw: Any) -> Any:
        return "original", (mask, cache, kw)


def _compute(self: Any, hidden_states: Any, **options: Any) -> Any:
    return "fused", options


def test_arguments_have_the_names_of_the_original() -> None:
    layer: Any = layer_rule(_Later, compute=_compute).patched()
    x = torch.ones(2)
    assert layer(x, cache="c", more=1) == ("fused", {"mask": None, "cache": "c", "more": 1})
    assert layer(x, "m", "c") == ("fused", {"mask": "m", "cache": "c"})
    assert layer(hidden_states=x, mask="m") == ("fused", {"mask": "m", "cache": None})
    assert layer(x, past_key_values="c") == ("original", (None, "c", {}))
    with pytest.raises(TypeError):
        layer(x, "m", "c", "one too many")
